"""The process that runs a private cluster: `python -m cluster.serving.driver CONFIG FOLDER MODEL`, which
`launch` starts. It is `serve run CONFIG` with these differences:

* It starts a fork server for Ray's workers (`fork_server`), which imports while Ray starts.
* It writes Serve's status into FOLDER until the applications run (`status` reads it).
* Ray's dashboard starts after that, and its autoscaler never: each takes CPU time from the start of a cluster
  that has one host. Ray has no public settings for either.

Life cycle: it ends with SIGINT like `serve run`, and the fork server ends with it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from cluster.config.environment import child_environment
from cluster.serving import fork_server
from cluster.serving.status import are_running, write_status

PERIOD_S = 0.1


def main(config: str, folder: Path, model: str) -> None:
    server = [sys.executable, "-m", "cluster.serving.fork_server", str(folder), model]
    # It ends when this process does, which holds its stdin. With more than one OpenMP thread it would have
    # threads after its imports; replicas set the number of their threads themselves.
    subprocess.Popen(server, stdin=subprocess.PIPE, env=child_environment(OMP_NUM_THREADS="1"))
    sys.executable = fork_server.write_client(folder)  # Ray starts all its Python processes with it
    import ray
    from ray import serve
    from ray._private.node import Node
    from ray.serve import scripts
    from ray.serve._private.constants import SERVE_NAMESPACE

    start_dashboard = Node.start_api_server
    Node.start_api_server = Node.start_monitor = _start_nothing
    ray.init(address="local", namespace=SERVE_NAMESPACE)
    scripts.cli(["run", "--address=auto", "--non-blocking", config], standalone_mode=False)
    try:
        follow(folder)
        node = ray._private.worker._global_node
        start_dashboard(node, include_dashboard=None, raise_on_failure=False)
        sys.stderr.write(f"dashboard at {node.webui_url}\n")
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()


def follow(folder: Path) -> None:
    """Writes the status of all applications until all run."""
    from ray.serve.context import _get_global_client

    pause, applications = threading.Event(), {}
    while not are_running(applications):
        pause.wait(PERIOD_S)
        applications = _get_global_client().get_serve_details()["applications"]
        write_status(folder, applications)


def _start_nothing(node: Any, **options: Any) -> None:
    """In place of a method of `Node`."""


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
