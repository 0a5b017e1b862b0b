"""OpenAI's HTTP API, without model, tokens and cluster.

app          routes, streams, disconnects
errors       errors as answers
edge         around every request: ids, unanswered errors, clients that do not read, event-loop lag
keys         which requests may pass, and as which tenant
rates        what a tenant has used of its limits
bodies       reads request bodies within limits
schema       request bodies as pydantic models
translate    a body to a frozen call (`router.calls`), or an error that names the field
messages     … its messages
tools        … its tools
limits       what one request may ask for
protocol     what the API needs of the door behind it
serving      runs one call against the door
render       answers and stream events as bytes
openapi      describes the API
"""
