"""What the programs of pool processes share (`processes` starts these and asks): a server that forks, forked
processes that follow orders one at a time, with one thread of Python, and the files in memory between them.

    asker → process  an order, and two files in memory: the input, sealed, and one for the result
    process → asker  the program's answer: the result is in its file, which is sealed if it is large; or
                     Refused

A process ends when its asker closes the socket, or at once with the server, which ends with its asker.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np

from cluster.errors import ClusterError, ErrorInfo, to_info

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
MAX_MESSAGE_BYTES = 1 << 16
# A result up to this size is copied, and its file used again: new memory costs more than copying. A larger
# one stays where it is.
MAX_COPIED_BYTES = 16 << 20
_PR_SET_PDEATHSIG = 1

encoder = msgspec.msgpack.Encoder()


class ProcessOrder(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A base of orders."""

    timeout_s: float


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of a process. A descriptor of the process comes with it."""

    is_filtered: bool  # whether it may make no system calls but a few; see `confinement`


class Refused(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


AnyOrder = TypeVar("AnyOrder", bound="ProcessOrder")


class Asker:
    """The other end of a process's socket."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._handle = os.pidfd_open(os.getpid())  # a confined process cannot make one

    def follow(
        self,
        orders: msgspec.msgpack.Decoder[AnyOrder],
        follow: Callable[[AnyOrder, int, int], msgspec.Struct],
        *,
        is_filtered: bool = True,
    ) -> None:
        """Answers orders until the other end closes. `follow`: order, descriptors of the input and of the
        result's file → answer; a ClusterError becomes Refused."""
        socket.send_fds(self._end, [encoder.encode(ProcessReady(is_filtered))], [self._handle])
        os.close(self._handle)
        while True:
            message, files, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, 2)
            if not message:
                return
            try:
                answer = follow(orders.decode(message), *files)
            except ClusterError as error:
                answer = Refused(to_info(error))
            for number in files:
                os.close(number)
            self._end.send(encoder.encode(answer))


def fork_processes(serve: Callable[[Asker], None]) -> None:
    """Forks a process for each socket that comes, until the other end closes. The process ends with
    `serve`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes need not be waited for
    gc.collect()
    gc.freeze()  # a process that collected all that is imported would copy its pages
    server, pid = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    while True:
        message, ends, _, _ = socket.recv_fds(server, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            server.close()
            os.dup2(0, 1)  # the null device
            os.dup2(0, 2)
            end_with(pid)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the asker is gone
                serve(Asker(socket.socket(fileno=ends[0])))
            os._exit(0)
        os.close(ends[0])


def memory_file() -> int:
    """An empty file in memory. It is freed when all its descriptors and mappings are gone."""
    return os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@contextlib.contextmanager
def open_memory_file() -> Iterator[int]:
    file = memory_file()
    try:
        yield file
    finally:
        os.close(file)


def append(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def seal(file: int) -> None:
    """Seals the file: from now on nothing can change it."""
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)


def result_bytes(file: int, num_bytes: int) -> np.ndarray:
    """[num_bytes] uint8, private to the caller: a large result is mapped where it lies and freed with the
    array, others are copied from memory that the process keeps. Raises ValueError if the file has another
    size, or is large and not sealed."""
    if os.fstat(file).st_size != num_bytes:
        raise ValueError("the result has another size")
    if num_bytes > MAX_COPIED_BYTES:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("the result is not sealed")
        return np.frombuffer(mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE), np.uint8)
    data = np.empty(num_bytes, np.uint8)
    if os.preadv(file, [data.data], 0) < num_bytes:
        raise ValueError("the result was cut")
    return data


def finish(result: int, num_bytes: int) -> None:
    """The result's file has this size, and nothing can change it any more if it is large."""
    os.ftruncate(result, num_bytes)
    if num_bytes > MAX_COPIED_BYTES:
        seal(result)


def end_with(parent: int) -> None:
    """The kernel ends this process when `parent` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before
