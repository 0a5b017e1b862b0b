"""Which hosts may reach the sockets of Ray and Serve.

* Ray's processes listen on their node's address if that is 127.0.0.1, else on every interface.
* Serve's gRPC server of a replica unpickles what it receives, and listens on every interface.
  `bind_to_node_address` restricts it to the node's address.
* Sockets on other addresses than loopback must be protected by Ray's token authentication.
  `require_authentication` checks it.
"""

from __future__ import annotations

import ipaddress

import ray

from cluster.config.environment import Environment
from cluster.errors import ConfigError
from deploy.serving import ray_internals


def bind_to_node_address() -> None:
    """Makes Serve's gRPC server of this replica listen on this node's address, where the doors dial it. Call
    it while Serve builds the replica, because Serve starts the server afterwards. Raises ConfigError if this
    Ray offers no way to do so: the server would listen on every interface."""
    host = ray.util.get_node_ip_address()
    try:
        ray_internals.bind_replica_grpc(f"[{host}]:0" if ":" in host else f"{host}:0")
    except ray_internals.RayChanged as error:
        raise ConfigError(
            "a replica's gRPC server, which unpickles what it receives, would listen on every interface: "
            f"{error}"
        ) from error


def require_authentication(host: str, environment: Environment) -> None:
    """Raises ConfigError if other machines can reach this node's address `host` and Ray requires no token."""
    if ipaddress.ip_address(host).is_loopback or environment.is_ray_authenticated:
        return
    raise ConfigError(
        f"Ray listens on {host} without authentication: any host that reaches it can run code on this "
        "machine. On one machine start it "
        "with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which keeps it on loopback; on several give every host "
        "the same token "
        "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH). See SECURITY.md",
        param="RAY_AUTH_MODE",
    )
