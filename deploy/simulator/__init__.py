"""The cluster in virtual time.

The doors' request flow, placement, admission, the order of work and the steps of prompts are the real objects
(`router.flow`, `router.policy`, `router.admission`, `cluster.scheduling`, `cluster.engine.planner`,
`encoder_service.scheduler`); devices, links, caches and memory are models whose durations come from curves
(`hardware`). Everything runs on one thread from one heap of events (`events`), and a run follows from its
seed alone. torch is not loaded.

A request: `workload` makes it, `client` asks a door for it, `door` drives the router's flow, `encoder` and
`language` compute it by turns of their `device`, `answers` are generated, `outcome` says what became of it.
Doors and workers exchange the cluster's real messages (`cluster.types.messages`); `attempt` is what the
workers keep of one attempt. `simulation` puts it together, `layouts` says which workers there are, `results`
condenses the outcomes, `planner` searches for the best layout. Experiments, policies to compare with and the
comparison with a live run are in `bench.router`.
"""
