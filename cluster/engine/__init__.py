"""The language engine: one step loop that computes prompts, generates answers, and hands KV over.

`engine` is the loop, `state` the records, `intake` how requests get blocks, `planner` what of the prompts
runs in a step, `forward` the step and `runner` its device code, `answers` what is generated, `tables` the
blocks, `lifecycle` how requests end, `features` where embeddings come in. Ports, which a worker has or has
not: `kv_input` (KV comes in), `kv_output` (KV goes out). `worker` is the process around it.
"""
