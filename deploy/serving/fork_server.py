"""Worker processes of Ray without the time that their imports take: they are forked from a process that has
imported everything else already.

Ray starts a worker by running a script with `python`. In a cluster of `epdg serve` that `python` is a small
program (`CLIENT`). It sends its arguments, environment, folder and standard streams to the fork server, and
ends when the fork server has forked a child that runs the script in its place. It runs the script with the
real interpreter if there is no fork server, if the fork server refuses, and for Ray's other processes. Of
these, agents, log monitor and dashboard run with a low priority: neither a start nor a request waits for
them.

Life cycle: `launch` starts the process `python -m deploy.serving.fork_server FOLDER MODEL`. The driver
(`deploy.serving.driver`) holds the other end of its stdin. The process listens in FOLDER, imports `IMPORTS`
and what MODEL needs, and ends when its stdin ends, which is when the driver ends. Between two imports it
forks up to `MAX_EARLY` children: Serve's controller, its proxies and the task that builds the application are
the first workers and need no torch. Later requests wait for the last import.

What a child shares with its siblings, and what it must not share:

* Ray. Its core draws the ids of workers, tasks and objects from random state in memory; two workers with the
  same state draw the same ids, and each takes the other's objects for its own. So this process never imports
  Ray; every child imports it by itself. `check_forkable` refuses to fork otherwise.
* Threads and CUDA: `check_forkable` refuses to fork after a thread or CUDA was started.
* Random state of Python and numpy: new in each child. torch's starts from a constant in every process.
* What a library has read from the environment when it was imported: a request whose environment differs in
  more than Ray's own variables is refused.
* Process group, nice value, resource limits and the priority for the kernel's out-of-memory killer: the
  child takes those of the process that requested it.

One thread. Imports no Ray.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config.environment import child_environment, replace_environment

SOCKET_NAME, CLIENT_NAME = "fork", "python"
MAX_EARLY = 4  # Serve's controller, its two proxies, and the task that builds the application
MAX_REQUEST_BYTES = 1 << 20  # arguments and environment of one worker
RECEIVE_TIMEOUT_S = 5.0
# Modules that Ray, Serve and our services load, in the order of their use. Never Ray itself, and not grpc,
# whose core has random state and threads of its own.
IMPORTS = (
    "asyncio", "numpy", "requests", "jsonschema", "yaml", "click", "msgpack", "google.protobuf.json_format",
    "pydantic", "fastapi", "uvicorn", "uvloop", "watchfiles",
    "opentelemetry.trace", "opentelemetry.sdk.metrics", "opentelemetry.exporter.prometheus",
    "torch", "transformers",
    "router.door", "router.api.app",
    "torch._dynamo", "cluster.model", "transformers.modeling_utils",
    "prefill_service.service", "decode_service.service", "encoder_service.service", "deploy.whole",
)  # fmt: skip
# Variables that may differ from one worker to the next. Ray sets its own and SPT_NOENV, and reads them in the
# child; the others are read when a worker starts to compute.
WORKER_PREFIX, WORKER_VARIABLES = "RAY_", {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SPT_NOENV"}
# Ray's processes that take a core from the start, and later from steps, at most a tenth of the time.
BACKGROUND, BACKGROUND_NICE = ("/agent.py", "/agent/main.py", "/log_monitor.py", "/dashboard.py"), 10
# RAY_RAYLET_PID is the process with which a worker ends. Ray means the raylet, which no worker needs once it
# runs: in place of it workers end with the driver, with which the raylet ends, too.
# Runs without the site packages and ignores PYTHON* variables, so that it starts in milliseconds.
CLIENT = """#!{python} -IS
import json, os, socket, sys
arguments = sys.argv[1:]
if (arguments or [""])[0].endswith("default_worker.py"):
    os.environ["RAY_RAYLET_PID"] = {driver!r}
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode("utf-8", "surrogateescape")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect({address!r})
            socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(request)
            if server.recv(1) == {forked!r}:
                sys.exit(0)
    except OSError:
        pass
elif any(argument.endswith({background!r}) for argument in arguments):
    os.nice({nice})
os.execv({python!r}, [{python!r}, *arguments])
"""
_FORKED = b"1"
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class NotForkable(RuntimeError):
    """This process must not fork workers. The message says why."""


@dataclass(frozen=True)
class ForkRequest:
    """What a child shall run in place of the process `pid`, which requested it and waits."""

    arguments: Sequence[str]  # the script and its arguments
    environment: Mapping[str, str]
    folder: str
    streams: Sequence[int]  # file descriptors of stdin, stdout and stderr
    pid: int

    def close(self) -> None:
        for stream in self.streams:
            os.close(stream)

    def take_over(self) -> None:
        """Gives this process, a child, what the process `pid` has, and random state of its own."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # when a worker ends, the raylet kills the worker's process group
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, self.pid))
        for name, number in vars(resource).items():
            if name.startswith("RLIMIT_"):
                resource.setrlimit(number, resource.prlimit(self.pid, number))
        oom_score = Path(f"/proc/{self.pid}/oom_score_adj").read_text()
        Path("/proc/self/oom_score_adj").write_text(oom_score)
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
        self.close()
        replace_environment(self.environment)
        os.chdir(self.folder)
        if "numpy" in sys.modules:  # Python's own generator does this by itself
            sys.modules["numpy"].random.seed()
        gc.enable()

    def run(self) -> None:
        """Raises SystemExit like any script."""
        script, *_ = sys.argv = list(self.arguments)
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def write_client(folder: Path) -> str:
    """Returns the program to start workers with, which end with this process. `folder` must be private."""
    client = folder / CLIENT_NAME
    client.touch(mode=0o700)
    address = str(folder / SOCKET_NAME)
    client.write_text(
        CLIENT.format(
            python=sys.executable,
            driver=str(os.getpid()),
            address=address,
            forked=_FORKED,
            background=BACKGROUND,
            nice=BACKGROUND_NICE,
        )
    )
    return str(client)


def check_forkable(modules: Mapping[str, object], files: Sequence[str]) -> None:
    """Raises NotForkable if a child would share what it must not share. `modules`: imported ones. `files`:
    paths of open ones."""
    if loaded := sorted(name for name in modules if name.partition(".")[0] in ("ray", "grpc")):
        raise NotForkable(f"{loaded[0]} has been imported")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise NotForkable("an import has initialised CUDA")
    if any(file.startswith("/dev/nvidia") for file in files):  # asking for the number of GPUs is enough
        raise NotForkable("an import has started CUDA's driver")
    if len(os.listdir("/proc/self/task")) > 1:
        raise NotForkable("an import has started a thread")


def _open_files() -> list[str]:
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, by now closed
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return files


def import_model(folder: Path) -> None:
    """What every worker of the model in this folder would load of transformers. Nothing if there is none."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not (folder / "config.json").is_file():
        return
    config = json.loads((folder / "config.json").read_bytes())
    mapping = importlib.import_module("transformers.conversion_mapping")
    mapping.get_checkpoint_conversion_mapping(config.get("model_type"))  # compiles the patterns of all models
    for name in config.get("architectures") or ():
        getattr(transformers, name, None)  # imports the class


class ForkServer:
    def __init__(self, folder: Path):
        """Listens."""
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / SOCKET_NAME)
        self._listener.bind(address)
        os.chmod(address, 0o600)
        self._listener.listen(64)
        self._environment = child_environment()
        self._num_early = 0

    def run(self, imports: Sequence[str], model: Path) -> ForkRequest | None:
        """Returns None when stdin has ended. Returns in each child, too: the request that it shall run.
        Raises NotForkable."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
        gc.disable()  # a child that collected all that is imported would copy its pages
        for name in imports:
            with contextlib.suppress(ModuleNotFoundError):  # costs the workers time and nothing else
                importlib.import_module(name)
            while self._num_early < MAX_EARLY and self._is_asked(timeout_s=0.0):
                self._num_early += 1
                if (request := self._answer()) is not None:
                    return request
        import_model(model)
        while self._is_asked():
            if (request := self._answer()) is not None:
                return request
        return None

    def _is_asked(self, timeout_s: float | None = None) -> bool:
        """Whether there is a request. False: stdin has ended, or the time is over."""
        readable, _, _ = select.select([sys.stdin, self._listener], [], [], timeout_s)
        return readable == [self._listener]

    def _answer(self) -> ForkRequest | None:
        """Forks for one request or refuses it. Returns the request in the child, and None here."""
        connection, _ = self._listener.accept()
        with connection:
            try:
                request = _receive(connection)
            except (OSError, ValueError) as error:
                _say(f"not a request to fork: {error}")
                return None
            if differing := self._differing(request.environment):
                _say(f"a worker has other variables than the fork server and is not forked: {differing}")
            else:
                check_forkable(sys.modules, _open_files())
                gc.freeze()
                if os.fork() == 0:
                    self._listener.close()
                    request.take_over()
                    connection.send(_FORKED)
                    return request
            request.close()
        return None

    def _differing(self, environment: Mapping[str, str]) -> list[str]:
        """Names of variables that a library may have read here with another value."""
        changed = {name for name, _ in self._environment.items() ^ environment.items()} - WORKER_VARIABLES
        return sorted(name for name in changed if not name.startswith(WORKER_PREFIX))


def _receive(connection: socket.socket) -> ForkRequest:
    """Raises OSError or ValueError for a connection that is not one of our client's."""
    connection.settimeout(RECEIVE_TIMEOUT_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ValueError(f"it is of user {user}")
    header, streams, _, _ = socket.recv_fds(connection, 4, 3)
    size = int.from_bytes(header, "big")
    if not 0 < size <= MAX_REQUEST_BYTES or len(streams) != 3:
        raise ValueError(f"{size} bytes, {len(streams)} streams")
    body = bytearray()
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            raise ValueError("it ended early")
        body += part
    arguments, environment, folder = json.loads(body.decode("utf-8", "surrogateescape"))
    return ForkRequest(arguments, environment, folder, streams, pid)


def _say(line: str) -> None:
    sys.stderr.write(f"fork server: {line}\n")


def main(folder: str, model: str, *imports: str) -> None:
    try:
        request = ForkServer(Path(folder)).run(imports or IMPORTS, Path(model))
    except NotForkable as error:
        _say(f"ended, workers are started without it: {error}")
        os._exit(1)  # an exit would wait for threads that an import has started
    if request is not None:
        request.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
