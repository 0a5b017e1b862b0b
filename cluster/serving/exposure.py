"""What may reach the sockets of Ray and Serve.

Ray's processes listen on their node's address if that is 127.0.0.1, else on every interface. Serve's gRPC server of a replica, which
unpickles what it is sent, listens on every interface in either case; `bind_to_node_address` ends that. What listens on other
addresses than loopback must be behind Ray's token authentication: `require_authentication`.
"""

from __future__ import annotations

import ipaddress

import ray

from cluster.config.environment import Environment
from cluster.errors import ConfigError


def bind_to_node_address() -> None:
    """Serve's gRPC server of this replica will listen on this node's address, where the doors dial it. To be called while Serve
    builds the replica: it starts the server afterwards."""
    from ray.serve._private import replica as serve_replica  # no public setting exists

    add_port, host = serve_replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    netloc = f"[{host}]" if ":" in host else host
    serve_replica.add_port_to_grpc_server = lambda server, _: add_port(server, f"{netloc}:0")


def require_authentication(host: str, environment: Environment) -> None:
    """Raises ConfigError if this node's address `host` can be reached from other machines and Ray asks for no token."""
    if ipaddress.ip_address(host).is_loopback or environment.is_ray_authenticated:
        return
    raise ConfigError(
        f"Ray listens on {host} without authentication: whatever reaches it runs code on this machine. On one machine start it "
        "with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which keeps it on loopback; on several give every host the same token "
        "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH). See SECURITY.md",
        param="RAY_AUTH_MODE",
    )
