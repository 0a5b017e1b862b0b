"""Moving blocks between processes under leases: `agents` (transports), `codecs` (KV on the wire),
`lease` (the protocol between the owner of memory and its writer).
"""
