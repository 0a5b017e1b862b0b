"""The cluster in virtual time.

The doors' request flow, placement, admission and the order of work are the real objects (`router.flow`,
`router.policy`, `router.admission`, `cluster.scheduling`, `encoder_service.scheduler`); devices, links,
caches and memory are models whose durations come from curves (`hardware`). Everything runs on one thread from
one heap of events (`events`), and a run follows from its seed alone.

A request: `workload` makes it, `client` asks a door for it, `door` drives the router's flow, `encoder` and
`prefill` compute it by turns of their `device`, `decode` generates, `outcome` says what became of it. Doors
and workers exchange the cluster's real messages (`cluster.types.messages`); `attempt` is what the workers
keep of one attempt. `simulation` puts it together, `layouts` says which workers there are, `results`
condenses the outcomes, `planner` searches for the best layout.
"""
