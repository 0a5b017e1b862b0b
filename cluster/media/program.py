"""What the programs of pool processes share (`processes` starts these and asks): a server that forks, and
forked processes that follow orders one at a time, with one thread of Python.

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
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

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


def finish(result: int, num_bytes: int) -> None:
    """The result's file has this size, and nothing can change it any more if it is large."""
    os.ftruncate(result, num_bytes)
    if num_bytes > MAX_COPIED_BYTES:
        fcntl.fcntl(result, fcntl.F_ADD_SEALS, SEALS)


def end_with(parent: int) -> None:
    """The kernel ends this process when `parent` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before
