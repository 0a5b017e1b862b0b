"""`/v1/responses` over the same door: another form of the chat endpoint's request and answer.

A request is translated into the `ChatCall` that `/v1/chat/completions` would make of the same conversation
(`translate`), and its answer is rendered as a response object or as typed events (`render`). Nothing is
stored: each request carries its whole conversation. A background response is kept for a while (`kept`). Only
`routes` knows HTTP.
"""
