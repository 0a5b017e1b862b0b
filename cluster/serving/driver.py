"""The process that runs a private cluster: `python -m cluster.serving.driver CONFIG FOLDER`, which `launch`
starts. It is `serve run CONFIG` with these differences:

* Ray's workers come from a fork server (`fork_server`), which `launch` starts, too, and which imports while
  Ray starts.
* Ray's agents get their ports in advance. Otherwise the raylet starts no worker until both have imported
  what they need and written down their ports.
* It deploys when Serve's controller runs, and does not wait for the proxies before that.
* It writes Serve's status into FOLDER until the applications run (`status` reads it).
* Ray's dashboard starts after that, and its autoscaler never: each takes CPU time from the start of a cluster
  that has one host. Ray has no public settings for this, nor for the agents' ports.
* It starts the GCS again when that has ended. Its tables are on disk (`local_environment`), so nothing else
  ends with it.
* It ends when the raylet, which starts all processes, has ended and a pool is lost.

Life cycle: it ends with SIGINT like `serve run`, and the fork server ends with it.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cluster.serving import fork_server
from cluster.serving.ports import agent_ports
from cluster.serving.status import are_running, is_healthy, write_status

PERIOD_S = 0.1
SERVE_NAMESPACE = "serve"  # Serve's own constant takes half a second to import
GCS_MIN_LIFE_S = 5.0
HEALTH_PERIOD_S = 0.5
AGENT_PORT_NAMES = (
    "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port",
)  # fmt: skip


def main(config: Path, folder: Path) -> None:
    sys.executable = fork_server.write_client(folder)  # Ray starts all its Python processes with it
    is_stopping = threading.Event()
    try:
        node = start_ray()
        threading.Thread(target=keep_gcs, args=(node, is_stopping), daemon=True).start()
        follow(deploy(config), folder)
        sys.stderr.write(f"dashboard at {start_dashboard(node)}\n")
        wait_for_raylet(node, config)
    except KeyboardInterrupt:
        from ray import serve

        serve.shutdown()
    finally:
        is_stopping.set()


def start_ray() -> Any:
    """Ray's node object, which has started the processes of this host."""
    import ray
    from ray._private.node import Node

    importing = threading.Thread(target=importlib.import_module, args=["ray.serve._private.api"], daemon=True)
    importing.start()  # while the GCS and the raylet start; `deploy` needs it
    start_api_server, start_monitor, start_raylet = (
        Node.start_api_server,
        Node.start_monitor,
        Node.start_raylet,
    )

    def start_raylet_at_once(node: Any, *memory: Any) -> None:
        give_agents_ports(node)
        start_raylet(node, *memory)

    Node.start_api_server = _skip_dashboard
    Node.start_monitor = lambda node: None
    Node.start_raylet = start_raylet_at_once
    ray.init(address="local", namespace=SERVE_NAMESPACE)
    Node.start_api_server, Node.start_monitor, Node.start_raylet = (
        start_api_server,
        start_monitor,
        start_raylet,
    )
    return ray._private.worker._global_node


def give_agents_ports(node: Any) -> None:
    """Before the raylet starts: it reads the ports that the agents write down, or finds here."""
    from ray._raylet import persist_port

    for name, port in zip(AGENT_PORT_NAMES, agent_ports(len(AGENT_PORT_NAMES)), strict=True):
        setattr(node._ray_params, name, port)
        persist_port(node.get_session_dir_path(), node.node_id, name, port)


def start_dashboard(node: Any) -> str:
    """Returns its address."""
    node.start_api_server(include_dashboard=None, raise_on_failure=False)
    return node.webui_url


def keep_gcs(node: Any, is_stopping: threading.Event, now: Callable[[], float] = time.monotonic) -> None:
    """A thread: starts the GCS again, on its port and with its tables, until `is_stopping`. One that ends
    soon after its start is given up; then Ray ends the cluster."""
    while True:
        started_at = now()
        node.all_processes["gcs_server"][0].process.wait()
        if is_stopping.is_set():
            return
        if now() - started_at < GCS_MIN_LIFE_S:
            sys.stderr.write("the GCS ends again and again\n")
            return
        sys.stderr.write("the GCS has ended and is started again\n")
        node.kill_gcs_server(check_alive=False)
        node.start_gcs_server()


def wait_for_raylet(node: Any, config: Path) -> None:
    """Raises SystemExit when the raylet has ended and then a pool is lost. Until then the cluster answers: it
    needs the raylet only to start processes."""
    from cluster.serving import preflight

    node.all_processes["raylet"][0].process.wait()
    sys.stderr.write("Ray's raylet has ended: the cluster answers until a pool is lost\n")
    host, port = preflight.address_of(preflight.read_serve_file(config))
    pause = threading.Event()
    while is_healthy(f"http://{host}:{port}"):
        pause.wait(HEALTH_PERIOD_S)
    raise SystemExit("Ray's raylet has ended, and what is lost cannot be replaced")


def deploy(config: Path) -> Any:
    """Serve's client. Returns when the proxies are ready; the replicas start at the same time."""
    import ray
    from ray.serve._private.api import _create_controller_and_proxy_refs
    from ray.serve._private.client import ServeControllerClient
    from ray.serve._private.constants import HTTP_PROXY_TIMEOUT
    from ray.serve.config import gRPCOptions
    from ray.serve.context import _set_global_client
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(config.read_text()))
    controller, proxies = _create_controller_and_proxy_refs(
        schema.http_options.model_dump(),
        gRPCOptions(**schema.grpc_options.model_dump()),
        None,
        None,
        schema.controller_options,
        schema.proxy_location,
    )
    client = ServeControllerClient(controller)
    _set_global_client(client)
    client.deploy_apps(schema)
    ray.get(proxies, timeout=HTTP_PROXY_TIMEOUT)
    return client


def follow(client: Any, folder: Path) -> None:
    """Writes the status of all applications until all run."""
    pause, applications = threading.Event(), {}
    while not are_running(applications):
        pause.wait(PERIOD_S)
        applications = client.get_serve_details()["applications"]
        write_status(folder, applications)


def _skip_dashboard(node: Any, **options: Any) -> None:
    """In place of `Node.start_api_server`: what Ray does without a dashboard."""
    node._webui_url = ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
