"""What an HTTP API needs, whatever its endpoints are. `router.api` has the endpoints and composes the
application; this package imports none of them.

edge          around every request: ids, unanswered errors, clients that do not read, event-loop lag
keys          which requests may pass, and as which tenant
rates         what a tenant has used of its limits
pages         which web pages may call the server
limits        what one request may ask for
bodies        reads request bodies within limits
body_parser   from a request's body to what its endpoint makes of it
forms         parses bodies of multipart/form-data
pieces        writes large JSON piece by piece
event_stream  an answer that is a stream of server-sent events
disconnect    ends the work for a client that is gone
errors        errors as answers
"""
