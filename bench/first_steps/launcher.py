"""The command `epdg serve` as a user runs it: start, output and end of its process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import REPOSITORY, clusters

SERVE = (sys.executable, "-m", "deploy.serving.command", "serve")
READY = re.compile(r"^ready in ([\d.]+) s: (\S+)")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FailedStart:
    """A start that failed."""

    code: int
    seconds: float
    cpu_seconds: float  # of the command and the child processes that it waited for
    progress: tuple[str, ...]  # lines on stdout
    errors: tuple[str, ...]  # lines on stderr

    @property
    def has_started_ray(self) -> bool:
        return any(line.startswith("starting ") for line in self.progress)


@dataclass(frozen=True)
class ReadyServer:
    url: str
    seconds: float
    progress: tuple[str, ...]


def write_config(
    folder: Path, args: Mapping[str, Any] | None = None, port: int | None = None, **sections: Any
) -> Path:
    """deploy/cluster.yaml with a free port."""
    return clusters.write(clusters.configuration(args or {}, port=port, **sections), folder)


def run_until_end(config: Path, model: str | None, environment: Mapping[str, str], cwd: Path) -> FailedStart:
    """Runs a set-up that fails. Raises subprocess.TimeoutExpired for one that does not."""
    started_at, cpu_before = time.monotonic(), _cpu_of_children()
    done = subprocess.run(
        [*SERVE, str(config)],
        env=_environment(model, environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    seconds, cpu_seconds = time.monotonic() - started_at, _cpu_of_children() - cpu_before
    progress, errors = done.stdout.splitlines(), done.stderr.splitlines()
    return FailedStart(done.returncode, seconds, cpu_seconds, tuple(progress), tuple(errors))


@contextlib.contextmanager
def running(
    command: Sequence[str], model: str | None, cwd: Path, environment: Mapping[str, str] | None = None
) -> Iterator[ReadyServer]:
    """Yields when `ready in …` was printed; sends SIGINT when the block ends. Raises RuntimeError with the
    output if it does not get ready.
    """
    process = subprocess.Popen(
        list(command),
        env=_environment(model, environment or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watch = threading.Timer(START_TIMEOUT_S, process.send_signal, [signal.SIGINT])
    watch.start()
    try:
        yield _wait_ready(process)
    finally:
        watch.cancel()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=STOP_TIMEOUT_S)


def _wait_ready(process: subprocess.Popen[str]) -> ReadyServer:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if (match := READY.match(line)) is not None:
            return ReadyServer(match[2], float(match[1]), tuple(lines))
        lines.append(line.rstrip())
    raise RuntimeError("it did not start:\n" + "\n".join(lines))


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _environment(model: str | None, more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with the code of this checkout and one model."""
    kept = {name: value for name, value in os.environ.items() if name != "EPDG_MODEL"}
    chosen = {} if model is None else {"EPDG_MODEL": model}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **chosen, **more}
