"""Ray's private names. No other module uses them.

Ray has no public interface for these. If a name is gone, the function that needs it raises RayChanged
before it has changed anything, and its caller does without it:

* `start_ray` and `deploy`, the start of a private cluster (`driver`): it starts as `serve run` does,
  slower; the GCS is not started again, and the cluster ends with the raylet.
* `bind_replica_grpc` (`exposure`): the replica does not start, because every host could reach a socket
  that unpickles what it receives.
* `reuse_freed_port` (`door`): a warning; on the chart a door's successor may not get the door's port.
* `put` and `get`, from Serve's controller to replicas (`scaling`): a warning; each worker does all phases
  of its role.
* `by_value` and `start_membership_push` (`door`) stand on private names of a public class. Without them
  the door does not start: it would know no workers.

The start also needs Ray to be of `RELEASE`, because it relies on how Ray's node starts its processes. The
others act on one name each, in whichever release has it. `fork_server` relies on the arguments and
variables with which Ray starts workers; it runs what it does not recognise as Ray would.

Imports Ray and Serve inside the functions, because the driver starts Ray while Serve is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from typing import Any, cast

RELEASE = "2.60"  # pyproject.toml bounds it
SERVE_NAMESPACE = "serve"  # Serve's own constant takes half a second to import
NAMESPACE = "epdg"  # of our entries in Ray's key-value store
AGENT_PORT_NAMES = (
    "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port",
)  # fmt: skip
_NODE_CALLS = ("get_session_dir_path", "kill_gcs_server", "start_gcs_server")
_REPLACED = ("start_api_server", "start_monitor", "start_raylet")


class RayChanged(RuntimeError):
    """This Ray lacks a private name, or is of another release. The message says which."""


class LocalNode:
    """Ray's processes on this host, which this process has started."""

    def __init__(self, node: Any):
        """`node`: Ray's own object."""
        self._node = node

    def wait_for_gcs(self) -> None:
        """Blocks until the GCS has ended."""
        self._node.all_processes["gcs_server"][0].process.wait()

    def wait_for_raylet(self) -> None:
        """Blocks until the raylet has ended."""
        self._node.all_processes["raylet"][0].process.wait()

    def restart_gcs(self) -> None:
        """Starts the GCS, which has ended, again: on its port and with its tables."""
        self._node.kill_gcs_server(check_alive=False)
        self._node.start_gcs_server()

    def start_dashboard(self) -> str:
        """Returns its address."""
        self._node.start_api_server(include_dashboard=None, raise_on_failure=False)
        return self._node.webui_url


def start_ray(agent_ports: list[int]) -> LocalNode:
    """Starts a cluster of this host, without dashboard and autoscaler. Its agents get `agent_ports`, one for
    each of `AGENT_PORT_NAMES`: otherwise the raylet starts no worker until they have written theirs down.
    Serve is imported at the same time. Raises RayChanged before anything is started."""
    import ray

    check_release()
    with _names("the start of a private cluster"):
        from ray import _raylet
        from ray._private import worker
        from ray._private.node import Node

        persist_port = cast(Any, _raylet).persist_port
        for name in _NODE_CALLS:
            getattr(Node, name)
        originals = {name: getattr(Node, name) for name in _REPLACED}

    def start_raylet(node: Any, *memory: Any) -> None:
        for name, port in zip(AGENT_PORT_NAMES, agent_ports, strict=True):
            setattr(node._ray_params, name, port)
            persist_port(node.get_session_dir_path(), node.node_id, name, port)
        originals["start_raylet"](node, *memory)

    threading.Thread(target=_import_serve, daemon=True).start()
    with _replaced(
        Node, start_api_server=_skip_dashboard, start_monitor=lambda node: None, start_raylet=start_raylet
    ):
        ray.init(address="local", namespace=SERVE_NAMESPACE)
    return LocalNode(worker._global_node)


def deploy(content: Any) -> Any:
    """Starts Serve on the Ray of this process and deploys a configuration. Returns Serve's client when the
    proxies are ready; the replicas start at the same time. Raises RayChanged before anything is started."""
    import ray

    with _names("the deployment while proxies start"):
        from ray.serve._private.api import _create_controller_and_proxy_refs
        from ray.serve._private.client import ServeControllerClient
        from ray.serve._private.constants import HTTP_PROXY_TIMEOUT
        from ray.serve.config import gRPCOptions
        from ray.serve.context import _set_global_client
        from ray.serve.schema import ServeDeploySchema

        for name in ("deploy_apps", "get_serve_details"):
            getattr(ServeControllerClient, name)
    schema = ServeDeploySchema.model_validate(content)
    controller, proxies = _create_controller_and_proxy_refs(
        schema.http_options.model_dump(),
        gRPCOptions(**schema.grpc_options.model_dump()),
        None,
        None,
        cast(Any, schema.controller_options),
        schema.proxy_location,
    )
    client = ServeControllerClient(controller)
    _set_global_client(client)
    client.deploy_apps(schema)
    ray.get(proxies, timeout=HTTP_PROXY_TIMEOUT)
    return client


def bind_replica_grpc(address: str) -> None:
    """Makes Serve's gRPC server of this replica listen on `address` (host:port). Raises RayChanged."""
    with _names("the address of a replica's gRPC server"):
        from ray.serve._private import replica

        add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, address)


def reuse_freed_port() -> None:
    """Lets the HTTP server of this replica listen on a port whose last connections are still in TIME_WAIT, if
    Serve gives a freed port away at once (RAY_SERVE_PORT_QUARANTINE_S=0). Raises RayChanged."""
    with _names("the reuse of a door's port"):
        from ray.serve._private import constants, replica

        quarantine_s, start = constants.RAY_SERVE_PORT_QUARANTINE_S, replica.start_asgi_http_server
    if quarantine_s == 0:
        replica.start_asgi_http_server = lambda *args, **options: start(
            *args, **{**options, "enable_so_reuseport": True}
        )


def put(key: str, value: str) -> None:
    """Writes an entry into Ray's key-value store, which all processes of the cluster read. Raises
    RayChanged."""
    with _names("Ray's key-value store"):
        from ray.experimental.internal_kv import _internal_kv_put
    _internal_kv_put(key, value, namespace=NAMESPACE)


def get(key: str) -> bytes | None:
    """The entry of `put`. Blocks for a call to Ray. Raises RayChanged."""
    with _names("Ray's key-value store"):
        from ray.experimental.internal_kv import _internal_kv_get
    return _internal_kv_get(key, namespace=NAMESPACE)


def by_value(handle: Any) -> Any:
    """`handle`, a DeploymentHandle, with answers by value instead of through Ray's object store."""
    return handle.options(_by_reference=False)


def start_membership_push(handle: Any) -> None:
    """Lets the router of `handle` learn its replicas now instead of with the first call."""
    if not handle.is_initialized:
        handle._init()


def check_release() -> None:
    """Raises RayChanged if the Ray that is installed is not of `RELEASE`."""
    version = importlib.metadata.version("ray")
    if not version.startswith(f"{RELEASE}."):
        raise RayChanged(f"Ray {version} is installed; its private names are known of {RELEASE}")


@contextlib.contextmanager
def _names(what: str) -> Iterator[None]:
    """Inside, private names are only looked up."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise RayChanged(f"this Ray has no names for {what}: {error}") from error


@contextlib.contextmanager
def _replaced(owner: type, **methods: Any) -> Iterator[None]:
    """Inside, `owner` has these methods in place of its originals."""
    originals = {name: getattr(owner, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(owner, name, method)
        yield
    finally:
        for name, method in originals.items():
            setattr(owner, name, method)


def _import_serve() -> None:
    """`deploy` needs it, and reports it if it cannot be imported."""
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.serve._private.api")


def _skip_dashboard(node: Any, **options: Any) -> None:
    """Does what Ray's `Node.start_api_server` does without a dashboard."""
    node._webui_url = ""
