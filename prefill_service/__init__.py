"""Prefill pool: chunked, packed prefill with a prefix cache; embeddings come in, KV goes out.

`state` (one request's life), `scheduler` (pure: which tokens run in a step), `runner` (device code), `features` (arena for
embeddings), `transfer` (outgoing KV), `engine` (owns the state), `service` (side channel, health).
"""
