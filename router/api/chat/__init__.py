"""`/v1/chat/completions` and `/v1/completions`, over the door's two calls. Requests of the other endpoints
become chat requests.

schema     request bodies as pydantic models
translate  a body to a frozen call (`router.calls`), or an error that names the field
messages   … its messages
tools      … its tools
structure  … the form of its answers
render     answers and stream events as bytes
"""
