"""The endpoints of the HTTP API, without model, tokens and cluster. `router.http` is what they stand on.

app        composes all of it
routes     /v1/chat/completions, /v1/completions, /v1/messages, audio, tokens
chat       … the first two: request to call, deltas to answer
responses  /v1/responses, over the chat endpoint
anthropic  /v1/messages, over the chat endpoint
audio      transcriptions and translations of sound, over the chat endpoint
tokens     /tokenize and /detokenize
server     /v1/models, version, readiness, metrics, the API's description
adapters   loads and unloads LoRA adapters
openapi    describes the API
absent     refuses by name what this server does not have
serving    reads a request's call, runs it against the door and answers
body       request bodies as pydantic models: what is the same everywhere
fields     sampling fields, which are the same at several endpoints
names      errors in the endpoint's own names
protocol   what the API needs of the door; what a call depends on besides its body
"""
