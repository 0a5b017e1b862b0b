"""The door: OpenAI's HTTP API, and the decision which workers serve a request.

`openai` (HTTP in and out), `door` (text and media → request → text), `policy` (pure: where a request goes), `members` (who is
there), `flight` (one request's way through the phases), `metrics`.
"""
