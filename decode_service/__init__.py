"""Decode pool: continuous batching over KV that prefill workers have pushed here.

* `state`: the life of one request
* `tables`: which blocks a request holds
* `counts`: sequences and tokens, by state
* `local_prefill`: prompts that are computed here
* `speculation`: drafts of the next tokens
* `runner`: device code
* `kv_input`: incoming KV
* `lifecycle`: how requests end
* `engine`: owns the state
* `service`: side channel, health, the Serve calls
"""
