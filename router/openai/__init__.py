"""OpenAI's HTTP surface, and nothing behind it: no model, no tokens, no cluster.

`schema`: request bodies as pydantic models. `translate`: a body to a frozen call, or a refusal by name. `protocol`:
what the API needs of the door behind it. `render`: answers and stream events as bytes. `app`: routes, errors,
disconnects. `serving`: running one call against the door and turning it into an answer.
"""
