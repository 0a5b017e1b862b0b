"""An opener that does what its file says, as if the file had crashed or taken over a codec library. A program
for `ProcessServer`."""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cluster.errors import UnavailableError
from cluster.media.decoders import Decoders
from cluster.media.opener import DecodeOrder, Written, main
from cluster.media.processes import PoolProcess, ProcessPool, ProcessServer
from cluster.media.program import encoder
from cluster.media.settings import MediaSettings
from cluster.types.media import MediaOptions, Modality

_libc = ctypes.CDLL(None, use_errno=True)
ESCAPES: dict[str, Callable[[], object]] = {
    "read a file": lambda: os.open("/etc/hostname", os.O_RDONLY),
    "write a file": lambda: os.open("/tmp/opener", os.O_CREAT | os.O_WRONLY),
    "list a folder": lambda: os.listdir("/"),
    "make a file in memory": lambda: os.memfd_create("more"),
    "make a socket": lambda: socket.socket(),
    "fork": lambda: os.fork(),
    "run a program": lambda: os.execv("/bin/true", ["true"]),
    "signal a process": lambda: os.kill(os.getpid(), 0),
    "find a process": lambda: os.pidfd_open(1),
    "trace a process": lambda: _call(_libc.ptrace, 16, 1, 0, 0),
    "make memory executable": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "limit another process": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE),
    "be signalled by its socket": lambda: fcntl.fcntl(3, fcntl.F_SETOWN, 1),
    "lift its own limits": lambda: resource.setrlimit(resource.RLIMIT_AS, NO_LIMIT),
}
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
LARGE = (2400, 2400, 3)  # is not copied
# What an opener says that has been taken over, and what it leaves in the result's file before.
LIES: dict[str, tuple[object, bytes]] = {
    "of another size": (Written((2, 2, 3)), bytes(11)),
    "of no size": (Written((0, 2, 3)), b""),
    "of negative sides": (Written((-2, -2, 3)), bytes(12)),
    "of another rank": (Written((2, 6)), bytes(12)),
    "of another depth": (Written((2, 3, 2)), bytes(12)),
    "of more pixels than are accepted": (Written((101, 101, 3)), bytes(101 * 101 * 3)),
    "of infinite length": (Written((1 << 62, 1 << 62, 3)), bytes(12)),
    "no answer": (b"\0" * 100, b""),
    "a long answer": (b"\0" * (1 << 17), b""),
}


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")


def _is_refused(escape: Callable[[], object]) -> bool:
    try:
        escape()
    except (OSError, ValueError):  # `setrlimit` says ValueError
        return True
    return False


def _say(message: object) -> None:
    """To the asker, past `serve`."""
    end = next(number for number in range(3, 16) if _is_refused(partial(os.lseek, number, 0, os.SEEK_CUR)))
    os.write(end, message if isinstance(message, bytes) else encoder.encode(message))


def open_file(order: DecodeOrder, data: bytes) -> Iterator[np.ndarray]:
    name, _, rest = data.decode().partition(":")
    result = 5  # behind the standard streams, the socket and the file
    match name:
        case "crash":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(1000)
        case "memory":
            held = [np.empty(64 << 20, np.uint8) for _ in range(1 << 20)]
            yield np.array(len(held))
        case "result without end":
            while True:
                yield np.zeros((1024, 1024, 3), np.uint8)
        case "nan":
            yield np.array([0.0, np.nan], np.float32)
        case "escapes":
            refused = [_is_refused(escape) for escape in ESCAPES.values()]
            yield np.array([[[is_refused] * 3 for is_refused in refused]], np.uint8)
        case "lie":
            said, content = LIES[rest]
            os.pwrite(result, content, 0)
            os.ftruncate(result, len(content))
            _say(said)
            time.sleep(1000)
        case "large":
            yield np.ones(LARGE, np.uint8)
        case "large and not sealed":
            os.ftruncate(result, math.prod(LARGE))
            _say(Written(LARGE))
            time.sleep(1000)
        case "blame the server":
            raise UnavailableError("not now")
        case _:
            yield np.full((2, 2, 3), len(data), np.uint8)


def pid_of(opener: PoolProcess) -> int:
    lines = Path(f"/proc/self/fdinfo/{opener.process}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))


def ask() -> None:
    """As an encoder: prints the pids of a server and an opener, which then hangs."""
    server = ProcessServer(Written, "tests.fakes.hostile_opener")
    opener = PoolProcess(server)
    decoders, settings = Decoders(1, ProcessPool(lambda: opener)), MediaSettings()
    decoders.decode(Modality.IMAGE, b"good", settings, MediaOptions())
    assert server.process is not None
    print(server.process.pid, pid_of(opener), flush=True)
    decoders.decode(Modality.IMAGE, b"hang", settings, MediaOptions())


if __name__ == "__main__":
    ask() if sys.argv[1] == "ask" else main(open_file)
