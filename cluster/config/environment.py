"""The only file that reads environment variables. All other code gets a frozen value.

EPDG_MODEL           model folder or hub id, unless the application's arguments name one
EPDG_SOCKET_DIR      folder of Unix sockets and locks (default /tmp/epdg-<uid>), private to this user
EPDG_CLUSTER_SECRET  shared by all hosts of one cluster; needed when side channels run over TCP
EPDG_API_KEY         a key that clients must send, besides those of `door.access.key_file`
EPDG_ADMIN_KEY       a key for the paths of operators, such as /metrics
HF_HUB_OFFLINE       the Hugging Face hub's own variable: no model is downloaded
RAY_AUTH_MODE        Ray's own variable: whether its token authentication is on. Ray passes it to all
                     processes of a cluster
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec


class Environment(msgspec.Struct, frozen=True):
    model: str | None
    socket_dir: Path
    cluster_secret: str | None  # never logged; not part of ClusterArgs, because the dashboard shows those
    is_hub_offline: bool
    api_key: str | None = None  # never logged, as the next one
    admin_key: str | None = None
    is_ray_authenticated: bool = False


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    source = os.environ if variables is None else variables
    return Environment(
        model=source.get("EPDG_MODEL") or None,
        socket_dir=Path(source.get("EPDG_SOCKET_DIR") or f"/tmp/epdg-{os.geteuid()}"),
        cluster_secret=source.get("EPDG_CLUSTER_SECRET") or None,
        is_hub_offline=source.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        api_key=source.get("EPDG_API_KEY") or None,
        admin_key=source.get("EPDG_ADMIN_KEY") or None,
        is_ray_authenticated=source.get("RAY_AUTH_MODE", "disabled").lower() != "disabled",
    )


def tell_local_rank(rank: int) -> None:
    """Sets the rank for transformers, whose tensor parallelism reads it there, and the interface of this host
    for Gloo. Changes this process's environment."""
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def tell_net_devices(devices: Sequence[str]) -> None:
    """Sets the network devices for UCX; otherwise it listens on every interface of the host. UCX reads them
    when an agent is made. Changes this process's environment."""
    os.environ["UCX_NET_DEVICES"] = ",".join(devices)


def keep_process_without_peer() -> None:
    """Makes NCCL's watchdog not end this process when a peer of a process group is gone. NCCL reads it
    when a group is made. Changes this process's environment."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def child_environment(**overrides: str) -> dict[str, str]:
    """This process's environment with `overrides`, for a child process."""
    return {**os.environ, **overrides}


def python_path(first: Path) -> str:
    """PYTHONPATH with the folder `first` in front of what this process was given there."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))


def bare_environment(**overrides: str) -> dict[str, str]:
    """The same as `child_environment`, for a process that must not know secrets: only what a program is found
    by."""
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, **overrides}


def replace_environment(variables: Mapping[str, str]) -> None:
    """Makes `variables` this process's whole environment, for a process that was forked and not started."""
    os.environ.clear()
    os.environ.update(variables)
