"""`/v1/messages`, Anthropic's API, over the same door: another form of the chat endpoint's request and
answer.

A request is translated into the `ChatCall` that `/v1/chat/completions` would make of the same conversation
(`translate`), and its answer is rendered as a message or as typed events (`render`).
"""
