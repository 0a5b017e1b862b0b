"""The cluster in virtual time.

The doors' request flow, placement and admission, and the workers' engines with their block pools, caches,
leases and messages, are the real objects (`router`, `cluster.engine`, `encoder_service`); devices, links and
the clock are models whose durations come from curves (`hardware`). Everything runs on one thread from one
heap of events (`events`), and a run follows from its seed alone.

A request: `workload` makes it, `client` asks a door for it, `door` drives the router's flow, and the engines
of a `worker` compute it (`encoder`, `language`), over runners that spend the time of their `device`. Doors
and workers exchange the cluster's real messages (`network`), workers bytes over links (`transfer`).
`simulation` puts it together, `layouts` says which workers there are, `results` says what became of the
requests, `planner` searches for the best layout. Experiments, policies to compare with and the comparison
with a live run are in `bench.router`.
"""
