"""The process that runs a private cluster: `python -m deploy.serving.driver CONFIG FOLDER`, which `launch`
starts. It is `serve run CONFIG` with these differences:

* Ray's workers come from a fork server (`fork_server`), which `launch` starts, too, and which imports while
  Ray starts.
* Ray's agents get their ports in advance. Otherwise the raylet starts no worker until both have imported
  what they need and written down their ports.
* It deploys when Serve's controller runs, and does not wait for the proxies before that.
* It writes Serve's status into FOLDER until the applications run (`status` reads it).
* Ray's dashboard starts after that, in a thread, and its autoscaler never: each takes CPU time from the start
  of a cluster that has one host. Ray has no public settings for this, nor for the agents' ports.
* It starts the GCS again when that has ended. Its tables are on disk (`local_environment`), so nothing else
  ends with it.
* It ends when the raylet, which starts all processes, has ended and a pool is lost.

All but the status need Ray's private names (`ray_internals`). If this Ray has others, `run_plainly` is
`serve run CONFIG` by Ray's public interface, and one line of the log says so (`PLAIN_START`).

Life cycle: it ends with SIGINT like `serve run`, and the fork server ends with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.serving import fork_server, ray_internals
from deploy.serving.ports import agent_ports
from deploy.serving.ray_internals import LocalNode, RayChanged
from deploy.serving.status import PLAIN_START, are_running, is_healthy, write_status

PERIOD_S = 0.1
GCS_MIN_LIFE_S = 5.0
HEALTH_PERIOD_S = 0.5

Applications = Mapping[str, Any]  # by name, as Serve reports them


def main(config: Path, folder: Path) -> None:
    is_stopping = threading.Event()
    try:
        try:
            node, client = start_fast(config, folder, is_stopping)
        except RayChanged as error:
            sys.stderr.write(f"{PLAIN_START}{error}\n")
            return run_plainly(config, folder)
        follow(lambda: client.get_serve_details()["applications"], folder)
        threading.Thread(target=keep_dashboard, args=(node, is_stopping), daemon=True).start()
        wait_for_raylet(node, config)
    except KeyboardInterrupt:
        from ray import serve

        serve.shutdown()
    finally:
        is_stopping.set()


def start_fast(config: Path, folder: Path, is_stopping: threading.Event) -> tuple[LocalNode, Any]:
    """Returns Ray's processes and Serve's client. Raises RayChanged. If the deployment raises it, Ray runs
    already, and `run_plainly` uses it."""
    ray_internals.check_release()
    # Ray starts its processes with it
    original, sys.executable = sys.executable, fork_server.write_client(folder)
    try:
        node = ray_internals.start_ray(agent_ports(len(ray_internals.AGENT_PORT_NAMES)))
    except RayChanged:
        sys.executable = original
        raise
    threading.Thread(target=keep_gcs, args=(node, is_stopping), daemon=True).start()
    return node, ray_internals.deploy(yaml.safe_load(config.read_text()))


def run_plainly(config: Path, folder: Path) -> None:
    """`serve run CONFIG`, which returns after SIGINT. A thread writes the status."""
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    if not ray.is_initialized():
        ray.init(address="local", namespace=ray_internals.SERVE_NAMESPACE)

    def report() -> Applications:
        return plain_status(serve.status().applications)

    threading.Thread(target=follow, args=(report, folder), daemon=True).start()
    cli(["run", "--address", "auto", str(config)])


def plain_status(applications: Mapping[str, Any]) -> Applications:
    """Returns Serve's public status in the form of its details. The public one does not say how many replicas
    a deployment is to have, so those that there are count."""
    return {
        name: {
            "status": application.status,
            "message": application.message,
            "deployments": {
                deployment: {
                    "status": each.status,
                    "message": each.message,
                    "target_num_replicas": sum(each.replica_states.values()),
                    "replicas": [
                        {"state": state}
                        for state, number in each.replica_states.items()
                        for _ in range(number)
                    ],
                }
                for deployment, each in application.deployments.items()
            },
        }
        for name, application in applications.items()
    }


def keep_gcs(
    node: LocalNode, is_stopping: threading.Event, now: Callable[[], float] = time.monotonic
) -> None:
    """A thread: starts the GCS again, on its port and with its tables, until `is_stopping`. One that ends
    soon after its start is given up; then Ray ends the cluster."""
    while True:
        started_at = now()
        node.wait_for_gcs()
        if is_stopping.is_set():
            return
        if now() - started_at < GCS_MIN_LIFE_S:
            sys.stderr.write("the GCS ends again and again\n")
            return
        sys.stderr.write("the GCS has ended and is started again\n")
        node.restart_gcs()


def keep_dashboard(node: LocalNode, is_stopping: threading.Event) -> None:
    """A thread: starts the dashboard, which takes minutes on a busy machine. It stays until `is_stopping`,
    since the kernel ends Ray's processes with the thread that has started them."""
    sys.stderr.write(f"dashboard at {node.start_dashboard()}\n")
    is_stopping.wait()


def wait_for_raylet(node: LocalNode, config: Path) -> None:
    """Raises SystemExit when the raylet has ended and then a pool is lost. Until then the cluster answers: it
    needs the raylet only to start processes."""
    from deploy.serving import serve_file

    node.wait_for_raylet()
    sys.stderr.write("Ray's raylet has ended: the cluster answers until a pool is lost\n")
    host, port = serve_file.address_of(serve_file.read_serve_file(config))
    pause = threading.Event()
    while is_healthy(f"http://{host}:{port}"):
        pause.wait(HEALTH_PERIOD_S)
    raise SystemExit("Ray's raylet has ended, and what is lost cannot be replaced")


def follow(report: Callable[[], Applications], folder: Path) -> None:
    """Writes the status of all applications until all run. `report()` asks Serve for it."""
    pause, applications = threading.Event(), {}
    while not are_running(applications):
        pause.wait(PERIOD_S)
        applications = report()
        write_status(folder, applications)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
