"""The cluster in virtual time.

Doors, placement, admission and the order of work are the real objects (`router.policy`, `router.admission.queue`, `cluster.scheduling`,
`encoder_service.scheduler`); devices, links, caches and memory are models whose durations come from curves (`hardware`). Everything
runs on one thread from one heap of events (`events`), and a run follows from its seed alone.

A request: `workload` makes it, `door` places it, `encoder` and `prefill` compute it by turns of their `device`, `decode` generates;
`flight` is one attempt and what is recorded of it. `simulation` puts it together, `layouts` says which workers there are,
`results` condenses what came out, `planner` searches for the best layout.
"""
