"""`make serve`: one cluster on this machine, from start to a clean end. `python -m cluster.serving.launch [config.yaml]`.

Runs `serve run` with the environment that a private local cluster needs, waits until `/health` answers, says what to type
next, and on Ctrl-C or SIGTERM ends everything it started and nothing else. What it started is known by a folder of its own:
every process of this cluster has it as RAY_TMPDIR in its environment. Imports no Ray; the cluster runs in child processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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

from cluster.config.settings import REPOSITORY
from cluster.serving.local_environment import cluster_environment

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0  # for running requests to end and Serve to shut down, before what is left is killed
NOISE_LINES = 60


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
