"""Worker processes of Ray without the time that their imports take: they are forked from a process that has
imported everything already.

Ray starts a worker by running a script with `python`. In a cluster of `epdg serve` that `python` is a
small program (`CLIENT`), which sends its arguments, environment, folder and standard streams to the fork
server. The fork server forks; the child takes them over and runs the script. If the fork server does not
answer, the small program runs the script with the real interpreter. It does the same with Ray's other
processes and with workers of other jobs, because Ray's core has read the job's id when it was imported.

Life cycle, in processes:

1. The driver (`cluster.serving.driver`) imports Ray Serve and calls `start`. This forks the *early* server.
2. The early server forks the *full* server, which imports everything that replicas need (`IMPORTS`). Until
   the full server is done, the early server answers: Serve's controller and proxies are the first workers and
   need no torch. It answers `MAX_EARLY` requests; all others wait for the full server.
3. The early server ends when the full server is ready, and the full server when the driver ends.

No process here has more than one thread when it forks: if an import has started one, the full server ends,
and the real interpreter runs the workers. A child keeps nothing of the server: no socket, no pipe, no signal
handler. Imports no Ray itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cluster.config.environment import replace_environment, temporary_environment

SOCKET_NAME, CLIENT_NAME = "fork", "python"
JOB_ID = "01000000"  # Ray's id of a cluster's first job, which is the driver's
MAX_EARLY = 3  # the proxies and what builds the application
MAX_REQUEST_BYTES = 1 << 20  # arguments and environment of one worker
# Modules that Ray's workers, Serve's replicas and our services load, in the order of their use. A module that
# is missing here costs time and nothing else.
EARLY_IMPORTS = (
    "ray.serve.scripts", "ray._private.workers.default_worker", "ray.serve._private.controller",
    "ray.serve._private.proxy", "ray.serve._private.haproxy", "ray.serve._private.replica",
)  # fmt: skip
IMPORTS = (
    "cluster.app", "prefill_service.service", "decode_service.service", "encoder_service.service",
    "router.door", "router.openai.app",
)  # fmt: skip
# Runs without the site packages and ignores PYTHON* variables, which makes it start in milliseconds.
CLIENT = """#!{python} -IS
import json, os, socket, sys
arguments = sys.argv[1:]
if os.environ.get("RAY_JOB_ID") == {job!r} and (arguments or [''])[0].endswith("default_worker.py"):
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode("utf-8", "surrogateescape")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect({address!r})
            socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(request)
            if server.recv(1):
                sys.exit(0)
    except OSError:
        pass
os.execv({python!r}, [{python!r}, *arguments])
"""


@dataclass(frozen=True)
class ForkRequest:
    """What a forked child shall run in place of the process that requested it."""

    arguments: Sequence[str]  # the script and its arguments
    environment: dict[str, str]
    folder: str
    streams: Sequence[int]  # file descriptors of stdin, stdout and stderr

    def run(self) -> None:
        """Raises SystemExit like any script."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        replace_environment(self.environment)
        os.chdir(self.folder)
        script, *_ = sys.argv = list(self.arguments)
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def import_for_workers(names: Sequence[str]) -> None:
    """Imports Ray for this process and for those that are forked from it.

    When Ray's core is imported, it reads from the environment what the raylet tells each worker. Workers are
    forked later, so it is given here: the job, and the process with which a worker shall end, for which this
    one stands in."""
    with temporary_environment(RAY_JOB_ID=JOB_ID, RAY_RAYLET_PID=str(os.getpid())):
        _import_all(names)


def start(folder: Path, imports: Sequence[str] = IMPORTS) -> str:
    """Forks the fork server. Returns the program to start workers with, in `folder`, which must be private.
    Call it before the process has a second thread. In the forked processes this call never returns."""
    address, client = folder / SOCKET_NAME, folder / CLIENT_NAME
    client.touch(mode=0o700)
    client.write_text(CLIENT.format(python=sys.executable, address=str(address), job=JOB_ID))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    driver_end, held_by_driver = os.pipe()  # the driver holds its end until it ends
    if os.fork() != 0:
        listener.close()
        os.close(driver_end)
        return str(client)
    os.close(held_by_driver)
    _run_server(listener, driver_end, imports)


def _run_server(listener: socket.socket, driver_end: int, imports: Sequence[str]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    full_end, held_by_full = os.pipe()
    job = None
    if os.fork() != 0:
        os.close(held_by_full)
        job = _serve(listener, (driver_end, full_end), limit=MAX_EARLY)
        if job is None:
            os._exit(0)
    else:
        os.close(full_end)
        _import_all(imports)
        if len(os.listdir("/proc/self/task")) > 1:
            sys.stderr.write("workers are not forked: an import has started a thread\n")
            os._exit(1)
        gc.collect()
        gc.freeze()  # otherwise the first collection of each child would copy all pages
        os.close(held_by_full)
        job = _serve(listener, (driver_end,))
        if job is None:
            os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job.run()
    sys.exit(0)


def _serve(listener: socket.socket, ends: Sequence[int], limit: int | None = None) -> ForkRequest | None:
    """Answers requests until one of the pipes `ends` is closed at its other end, and then returns None. In a
    forked child: returns what to run."""
    num_answered = 0
    while True:
        is_open = limit is None or num_answered < limit
        readable, _, _ = select.select([*ends, *([listener] if is_open else [])], [], [])
        if set(ends) & set(readable):
            return None
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            job = _receive(connection)
            if os.fork() == 0:
                listener.close()
                for end in ends:
                    os.close(end)
                return job
            for stream in job.streams:
                os.close(stream)
            num_answered += 1
            connection.send(b"1")


def _receive(connection: socket.socket) -> ForkRequest:
    header, streams, _, _ = socket.recv_fds(connection, 4, 3)
    size = int.from_bytes(header, "big")
    if not 0 < size <= MAX_REQUEST_BYTES or len(streams) != 3:
        raise ValueError("not a request to fork")
    body = bytearray()
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            raise ValueError("the request ended early")
        body += part
    arguments, environment, folder = json.loads(body.decode("utf-8", "surrogateescape"))
    return ForkRequest(arguments, environment, folder, streams)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
