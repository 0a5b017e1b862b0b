"""The adapters between Ray Serve and our plain classes. With `deploy.app`, the only code that imports Ray;
nothing passes per token.

* `replicas`: wraps a worker service. `door`: wraps the HTTP door.
* `hook_router`: reports to doors which replicas exist, and sends a call to one chosen replica. `membership`:
  the door's end of that, and a `Member` as Serve carries it. `exposure`: which addresses Ray and Serve listen
  on.
* `command`, `launch`, `preflight`, `local_environment`, `status`: start, watch and stop a cluster on this
  machine. `driver`: the process that runs it. `fork_server`: forks its workers.
"""
