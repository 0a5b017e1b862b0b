"""Prefill pool: chunked, packed prefill with a prefix cache. Embeddings come in, KV goes out.

* `state`: the life of one request
* `allotment`: KV blocks for a prompt
* `steps`: which tokens run in a step
* `runner`: device code
* `features`: the memory for embeddings
* `transfer`: outgoing KV
* `lifecycle`: how requests end
* `engine`: owns the state
* `service`: side channel, health
"""
