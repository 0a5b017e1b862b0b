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


def bind_to_node_address() -> None:
    """Makes Serve's gRPC server of this replica listen on this node's address, where the doors dial it. Call
    it while Serve builds the replica, because Serve starts the server afterwards."""
    from ray.serve._private import replica as serve_replica  # no public setting exists

    add_port, host = serve_replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    netloc = f"[{host}]" if ":" in host else host
    serve_replica.add_port_to_grpc_server = lambda server, _: add_port(server, f"{netloc}:0")


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
