"""`make serve`: one cluster on this machine, from start to a clean end. `python -m cluster.serving.launch [config.yaml]`.

Runs `serve run` with the environment that a private local cluster needs, waits until `/health` answers, says what to type
next, and on Ctrl-C or SIGTERM ends everything it started and nothing else. What it started is known by a folder of its own:
every process of this cluster has it as RAY_TMPDIR in its environment. Imports no Ray; the cluster runs in child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import yaml

from cluster.config.environment import child_environment
from cluster.config.settings import REPOSITORY

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0  # for running requests to end and Serve to shut down, before what is left is killed
NOISE_LINES = 60
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


def cluster_environment(folder: Path) -> dict[str, str]:
    """What a private cluster on one machine needs, beside the environment this process has."""
    return child_environment(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}:/usr/local/bin",
        PYTHONPATH=str(REPOSITORY),
        RAY_ADDRESS="local",  # never join a cluster that happens to run here
        RAY_AUTH_MODE="disabled",  # everything listens on loopback; else tools without the token are refused
        RAY_OVERRIDE_RESOURCES=json.dumps(
            {f"{pool}_pool": POOL_SLOTS for pool in ("encode", "prefill", "decode")}
        ),
        RAY_TMPDIR=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES="150000000",  # nothing big passes through it; default: 30 % of RAM
        **QUIET,
        RAY_SERVE_ENABLE_HA_PROXY="1",  # the Python proxy would relay every chunk of every stream
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="0",  # else every stop takes 30 s
        RAY_SERVE_HAPROXY_STATS_PORT=str(
            free_port()
        ),  # the defaults are fixed: a second cluster could not start
        RAY_SERVE_HAPROXY_METRICS_PORT=str(free_port()),
        RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=str(free_port()),
        EPDG_SOCKET_DIR=str(folder / "s"),
        OMP_WAIT_POLICY="passive",  # threads of a pool that waits leave the cores to the others …
        GOMP_SPINCOUNT="20000",  # … after a short while: between the layers of a step they stay awake
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        NIXL_LOG_LEVEL="WARN",
    )


def free_port() -> int:
    """Nobody listens there now; it is below the ports that the system gives to connections, so that none takes it before it is used.
    Raises OSError when there is none."""
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            return port
    raise OSError(f"no port is free between {FREE_PORTS[0]} and {FREE_PORTS[-1]}")


def processes_of(folder: Path) -> list[int]:
    """Every living process that was started under this folder."""
    mark = f"RAY_TMPDIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


class LocalCluster:
    """A context manager: inside it the cluster runs. `url` is where it answers."""

    def __init__(self, config: Path, **environment: str):
        self.config = config
        options = yaml.safe_load(config.read_text())["http_options"]
        self.host, self.port = options["host"], options["port"]
        self.url = f"http://{self.host}:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="epdg-", dir="/tmp"))  # short: socket paths have 107 bytes
        self._log = self.folder / "serve.log"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        try:
            with socket.create_connection((self.host, self.port), 0.5):
                pass
        except OSError:
            self._start()
            return self
        shutil.rmtree(self.folder)
        raise RuntimeError(f"something listens on {self.host}:{self.port} already")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Blocks until /health is 200. Raises RuntimeError with the end of the log."""
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            if self.has_ended():
                raise RuntimeError(f"the cluster did not start:\n{self.log_end()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready after {timeout_s:.0f} s:\n{self.log_end()}")
            time.sleep(0.1)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-NOISE_LINES:])

    def dashboard_url(self) -> str:
        """Ray takes the next free port when its usual one is taken; its log says which."""
        found = re.search(r"dashboard at.*?(127\.0\.0\.1:\d+)", self._log.read_text(errors="replace"))
        return f"http://{found[1]}" if found else "not running"

    def stop(self) -> None:
        """Orderly first, then by process id. Blocks; may be repeated."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._end(number, patience_s=2.0)
        if process is not None:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        serve = Path(sys.executable).parent / "serve"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(serve), "run", str(self.config)],
                cwd=REPOSITORY,
                env={**cluster_environment(self.folder), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C comes to us alone
                preexec_fn=_listen_to_sigint,
            )

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _end(self, number: int, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while processes_of(self.folder) and time.monotonic() < deadline:
            time.sleep(0.05)


def _listen_to_sigint() -> None:
    """A shell without job control starts background jobs deaf to SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _welcome(cluster: LocalCluster, seconds: float) -> str:
    return f"""ready in {seconds:.1f} s: {cluster.url}   (Ctrl-C stops it; dashboard {cluster.dashboard_url()})

    curl {cluster.url}/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{{"messages": [{{"role": "user", "content": "hello"}}], "model": "'$(curl -s {cluster.url}/v1/models \\
      | python3 -c 'import json,sys; print(json.load(sys.stdin)["data"][0]["id"])')'"}}'
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a cluster on this machine until Ctrl-C.")
    parser.add_argument("config", nargs="?", type=Path, default=REPOSITORY / "deploy" / "cluster.yaml")
    config: Path = parser.parse_args().config.resolve()
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    started_at = time.monotonic()
    try:
        with LocalCluster(config) as cluster:
            print(f"starting {config.name} …", flush=True)
            cluster.wait_ready()
            print(_welcome(cluster, time.monotonic() - started_at), flush=True)
            while not cluster.has_ended():
                time.sleep(0.5)
            print(f"the cluster has ended:\n{cluster.log_end()}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
