"""One cluster on this machine, from start to end. `LocalCluster` does the process work of `epdg serve`
(`command`).

Life cycle:

1. `preflight` checks everything that can be known before the start.
2. Where workers share a GPU, NVIDIA's daemon for that starts (`mps`).
3. The driver (`driver`), which is `serve run` with a fork server (`fork_server`), starts with it in the
   environment of a private local cluster (`local_environment`). With a Ray whose internals it does not know
   it is plain `serve run`.
4. `status` follows Serve's report of the start until `/health` answers.
5. The end stops every process of this cluster and no other. Such a process has the cluster's own folder as
   RAY_TMPDIR in its environment. After a failure the logs in that folder stay; after a clean end the folder
   is removed.

Imports no Ray; the cluster runs in child processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import yaml

from cluster.config.checkpoint import read_config
from cluster.config.environment import child_environment
from cluster.config.families import family_of_type
from cluster.types.media import Modality
from deploy.serving import preflight, serve_file
from deploy.serving.local_environment import cluster_environment
from deploy.serving.mps import shares_gpus, start_mps
from deploy.serving.status import (
    PLAIN_START,
    ClusterFailed,
    StartProgress,
    are_running,
    is_healthy,
    own_message,
    read_status,
)

READY_TIMEOUT_S = 1800.0  # large models on slow disks take long; failures are noticed much sooner
POLL_S = 0.1
STOP_TIMEOUT_S = 30.0  # for running requests and Serve to end, before remaining processes are killed
NOISE_LINES = 60


def processes_of(folder: Path) -> list[int]:
    """Process ids of all living processes that were started under this folder."""
    mark = f"RAY_TMPDIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _in_silence(line: str) -> None:
    """The default of `say`: no lines of progress."""


class LocalCluster:
    """A context manager inside which the cluster runs. `url`: where it answers. `folder`: where its logs
    are. `modalities`: of media that its model takes."""

    def __init__(self, config: Path, *, say: Callable[[str], None] = _in_silence, **environment: str):
        """`say` receives lines of progress. Raises ConfigError for a file that is not a Serve
        configuration."""
        self._config = config
        host, port = serve_file.address_of(serve_file.read_serve_file(config))
        self.url = f"http://{host}:{port}"
        # a short path, because socket paths have at most 107 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="epdg-", dir="/tmp"))
        self.modalities: tuple[Modality, ...] = ()
        self._log = self.folder / "serve.log"
        self._say = say
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None  # the driver
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._mps: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        """Raises ConfigError, before anything is started, for a configuration that cannot work."""
        try:
            plan = preflight.check(self._config, child_environment(**self._environment))
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        for note in plan.notes:
            self._say(note)
        if model := _model_of(plan):
            config = read_config(model)
            self.modalities = tuple(family_of_type(config["model_type"]).encoders_of(config))
        self._start(plan)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(has_failed=isinstance(error, ClusterFailed))

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Blocks until /health answers 200. Raises ClusterFailed with one line; the logs are then kept."""
        deadline = time.monotonic() + timeout_s
        progress = StartProgress()
        while True:
            if self.has_ended():
                raise ClusterFailed(own_message(self.log_end()))
            if time.monotonic() > deadline:
                raise ClusterFailed(f"not ready after {timeout_s:.0f} s")
            applications = read_status(self.folder)
            for line in progress.update(applications, time.time()):
                self._say(line)
            if are_running(applications) and is_healthy(self.url):
                for line in self._log_lines(PLAIN_START):
                    self._say(line)
                return
            time.sleep(POLL_S)

    def wait_ended(self) -> None:
        """Blocks while the cluster runs. Raises ClusterFailed when it ends by itself, because it should run
        until `stop`."""
        dashboard = None
        while not self.has_ended():
            if dashboard is None and (dashboard := self.dashboard_url()) is not None:
                self._say(f"dashboard: {dashboard}")
            time.sleep(0.5)
        raise ClusterFailed(f"the cluster has ended: {own_message(self.log_end())}")

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-NOISE_LINES:])

    def dashboard_url(self) -> str | None:
        """The address in the driver's log: if its usual port is taken, Ray uses the next free one. None: the
        dashboard has not started yet, which it does after the applications."""
        found = re.search(r"dashboard at.*?(127\.0\.0\.1:\d+)", self._log.read_text(errors="replace"))
        return f"http://{found[1]}" if found else None

    def _log_lines(self, beginning: str) -> list[str]:
        """The lines of the driver's log with this beginning."""
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith(beginning)]

    def stop(self, *, has_failed: bool = False) -> None:
        """Stops Serve in an orderly way, then kills remaining processes. After a failure it only kills, and
        keeps the logs. Blocks; may be repeated."""
        process, self._process = self._process, None
        if process is not None and not has_failed:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._end(number, timeout_s=2.0)
        for ended in (process, self._fork_server, self._mps):
            if ended is not None:
                ended.wait()
        if has_failed:
            self._keep_logs()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, plan: preflight.StartPlan) -> None:
        config = self.folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(dict(plan.content), sort_keys=False))
        environment = {**cluster_environment(self.folder), **self._environment}
        if shares_gpus(plan.content):
            self._mps, found_by = start_mps(self.folder, environment, self._say)
            environment |= found_by
        ends_with_driver, held_by_driver = os.pipe()
        with os.fdopen(ends_with_driver), os.fdopen(held_by_driver, "wb"), self._log.open("wb") as log:
            # With more than one OpenMP thread it would have threads after its imports; replicas set the
            # number of their threads themselves.
            self._fork_server = self._spawn(
                log,
                {**environment, "OMP_NUM_THREADS": "1"},
                ["deploy.serving.fork_server", str(self.folder), _model_of(plan)],
                stdin=ends_with_driver,
            )
            self._process = self._spawn(
                log,
                environment,
                ["deploy.serving.driver", str(config), str(self.folder)],
                stdin=subprocess.DEVNULL,
                pass_fds=[held_by_driver],
            )

    def _spawn(
        self,
        log: BinaryIO,
        environment: Mapping[str, str],
        module: list[str],
        stdin: int,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            cwd=self.folder,
            env=environment,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches only this process
            preexec_fn=_listen_to_sigint,
            pass_fds=pass_fds,
        )

    def _keep_logs(self) -> None:
        """Keeps Ray's logs, our own log and the configuration; removes everything else in the folder."""
        for logs in self.folder.glob("ray/session_2*/logs"):
            shutil.move(logs, self.folder / "logs")
        for entry in self.folder.iterdir():
            if entry.name not in (self._log.name, "logs", "cluster.yaml"):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()

    def _end(self, number: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while processes_of(self.folder) and time.monotonic() < deadline:
            time.sleep(0.05)


def _model_of(plan: preflight.StartPlan) -> str:
    """The folder of the first application's model; empty for an application of another kind."""
    ours = (each for each in plan.content["applications"] if each.get("import_path") == preflight.BUILDER)
    return next((each["args"]["model"] for each in ours), "")


def _listen_to_sigint() -> None:
    """A shell without job control starts background jobs that ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
