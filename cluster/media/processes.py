"""Pools of processes that follow orders (`program`): openers of media files, for a door (`surveyors`) and for
an encoder (`decoders`), and preprocessors (`preprocessors`).

`ProcessPool` has the processes of one asker. An order takes an idle process, or starts one:

* If a process dies over an order, or breaks the protocol, another one tries the order once more. An item that
  ends two processes is refused.
* If an order takes too long, or is cancelled, its process is killed at once.
* A process that has ended is replaced at once, so that an idle one is ready before it is needed.

An opener is taken for hostile: it has read hostile files. Answers have a fixed type and a bounded size.
Results are copied, or mapped when they are sealed, so that nothing can change them any more, and then
checked. Nothing outlives the asker's process.

Orders run on any thread. `ask` is a coroutine that waits in one place only: a door passes `wait_on_loop` and
awaits it, an encoder's thread passes a wait that blocks, and runs it with `run_blocking`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from cluster.config.environment import bare_environment
from cluster.errors import ClusterError, MediaError, NotWantedError, RequestError, UnavailableError, from_info
from cluster.media.program import (
    MAX_COPIED_BYTES,
    MAX_MESSAGE_BYTES,
    ProcessOrder,
    ProcessReady,
    Refused,
    append,
    encoder,
    memory_file,
    open_memory_file,
    seal,
)

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 2
START_TIMEOUT_S = 60.0  # importing FFmpeg and Pillow takes half a second, transformers some seconds
FORK_TIMEOUT_S = 10.0  # of a server that has started a process before, which takes milliseconds
GRACE_S = 1.0  # beyond the time limit: for what is not decoding
WANTED_EVERY_S = 0.05  # how often a thread that waits asks whether the result is still wanted

T = TypeVar("T")
A = TypeVar("A", bound=msgspec.Struct)
# Until the socket can be read. Raises TimeoutError, and whatever ends the order.
Wait = Callable[[socket.socket, float], Awaitable[None]]
# Answer of a process and the result's file → the result. Raises ValueError for one that is not right.
Read = Callable[[A, int], T]


class ProcessEndedError(Exception):
    """The process has died or violated the protocol."""


class ProcessNotStartedError(ProcessEndedError):
    """It has read no file yet."""


class ProcessServer(Generic[A]):
    """The process that forks those of a pool. It is started with the first of them, and again when it has
    ended or no longer forks. Any thread."""

    def __init__(self, answer: type[A], module: str, arguments: Sequence[str] = ()):
        """`module`: the program. `answer`: what its processes answer, unless they refuse."""
        self.answers = msgspec.msgpack.Decoder(answer | Refused)
        self._command = [sys.executable, "-m", module]
        self._arguments = arguments
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None  # while it serves
        self._socket: socket.socket | None = None
        self._has_forked = False

    def fork(self, end: socket.socket) -> int:
        """A process serves at this end as soon as the server has imported everything. Does not wait. Returns
        the id of the server's process."""
        with self._lock:
            if self._socket is None or self.process is None or self.process.poll() is not None:
                self.process, self._socket = self._start()
            try:
                socket.send_fds(self._socket, [b"f"], [end.fileno()])
            except OSError:  # it has just ended, and is started again by the next order
                logger.warning("the process that forks those for media has ended")
            return self.process.pid

    @property
    def start_timeout_s(self) -> float:
        return FORK_TIMEOUT_S if self._has_forked else START_TIMEOUT_S

    def is_serving(self, pid: int) -> bool:
        """Whether this process still forks, as far as is known."""
        return self._socket is not None and self.process is not None and self.process.pid == pid

    def forked(self) -> None:
        """A process of the pool has started."""
        self._has_forked = True

    def give_up(self, pid: int) -> None:
        """A process that this one should have forked did not start. Ends it with all that it has forked,
        unless another one has taken its place already."""
        with self._lock:
            if self.process is not None and self.is_serving(pid) and self.process.poll() is None:
                logger.warning("the process that forks those for media hangs: it is replaced")
                self.process.kill()
                self._socket = None

    def close(self) -> None:
        """Ends the server and its processes."""
        with self._lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The earlier socket, if there was one, is closed with its last reference."""
        self._has_forked = False
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *self._arguments],
                env=bare_environment(
                    PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
                    OPENBLAS_NUM_THREADS="1",  # a process with threads must not fork
                    MALLOC_ARENA_MAX="4",  # each reserves address space, which is limited
                    # an item uses the memory of the one before, as in a process that has freed a large block
                    MALLOC_MMAP_THRESHOLD_=str(32 << 20),
                    MALLOC_TRIM_THRESHOLD_=str(64 << 20),
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C must reach the asker only
            )
        return process, ours


class PoolProcess(Generic[A]):
    """One process. Follows one order at a time. After an interrupted `ask` it can only be closed."""

    def __init__(self, server: ProcessServer[A]):
        """Starts the process without waiting for it."""
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._server = server
        with theirs:
            self._server_pid = server.fork(theirs)
        self._socket.setblocking(False)
        self.process: int | None = None  # its descriptor, once it has started
        self._result = memory_file()
        self.is_filtered = True

    async def ask(self, order: ProcessOrder, file: int, wait: Wait, read: Read[A, T]) -> T:
        """`file`: sealed. Raises ProcessEndedError, TimeoutError for an order that takes too long, and
        RequestError for a file that cannot be used."""
        if self.process is None:
            await self._start_up(wait)
        try:
            socket.send_fds(self._socket, [encoder.encode(order)], [file, self._result])
            await wait(self._socket, order.timeout_s + GRACE_S)
            answer = self._server.answers.decode(self._socket.recv(MAX_MESSAGE_BYTES))
            if not isinstance(answer, Refused):
                return read(answer, self._result)
        except TimeoutError:
            raise
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ProcessEndedError from error
        finally:
            if os.fstat(self._result).st_size > MAX_COPIED_BYTES:
                os.close(self._result)
                self._result = memory_file()
        refusal = from_info(answer.error)
        raise refusal if isinstance(refusal, RequestError) else MediaError(refusal.message)

    @property
    def has_ended(self) -> bool:
        """Or has said something unasked. Do not ask while `ask` runs."""
        if not self._server.is_serving(self._server_pid):
            return True
        events = _events(self._socket, 0.0)
        return bool(events & select.POLLHUP) or (self.process is not None and events != 0)

    def kill(self) -> None:
        """Ends the process. A running `ask` raises ProcessEndedError."""
        if self.process is None:
            self._socket.shutdown(socket.SHUT_RDWR)
        else:
            _kill(self.process)

    def close(self) -> None:
        """Do not call it while `ask` runs."""
        self._socket.close()
        os.close(self._result)
        if self.process is not None:
            _kill(self.process)
            os.close(self.process)

    async def _start_up(self, wait: Wait) -> None:
        try:
            await wait(self._socket, self._server.start_timeout_s)
            message, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
            (self.process,) = descriptors
            self.is_filtered = msgspec.msgpack.decode(message, type=ProcessReady).is_filtered
            self._server.forked()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            if isinstance(error, TimeoutError):
                self._server.give_up(self._server_pid)
            raise ProcessNotStartedError from error


class ProcessPool(Generic[A]):
    def __init__(self, start: Callable[[], PoolProcess[A]]):
        self._start = start
        self._lock = threading.Lock()
        self.idle: list[PoolProcess[A]] = []
        self.busy: set[PoolProcess[A]] = set()
        self._is_closed = False
        self._has_warned = False

    @property
    def num_busy(self) -> int:
        return len(self.busy)

    def warm_up(self, num_processes: int = 1) -> None:
        """Starts processes until there are so many, so that the first orders need not wait for them."""
        with self._lock:
            while not self._is_closed and len(self.idle) + len(self.busy) < num_processes:
                self.idle.append(self._start())

    async def ask(self, order: ProcessOrder, file: int, wait: Wait, read: Read[A, T]) -> T:
        """Does what `PoolProcess.ask` does, but a process that ends is replaced, and too long an order is a
        MediaError. May be cancelled at any time."""
        ends_at = time.monotonic() + order.timeout_s
        bounded = order
        not_started = UnavailableError("the process that works on media did not start")
        reason: ClusterError = not_started
        for _ in range(NUM_ATTEMPTS):
            try:
                return await self._try_once(bounded, file, wait, read)
            except ProcessNotStartedError:
                reason = not_started
                continue
            except ProcessEndedError:
                reason = MediaError("cannot be decoded: the process that works on it dies")
                logger.warning("a process has ended over media: %s", type(order).__name__)
            except TimeoutError:
                raise MediaError(f"takes longer than {order.timeout_s:g} seconds to decode") from None
            bounded = msgspec.structs.replace(order, timeout_s=max(0.0, ends_at - time.monotonic()))
        raise reason

    def ask_blocking(
        self, order: ProcessOrder, data: bytes | memoryview, is_wanted: Callable[[], bool], read: Read[A, T]
    ) -> T:
        """`ask` about these bytes, on a thread that blocks no longer than the result `is_wanted`. Raises
        NotWantedError as well."""
        with open_memory_file() as file:
            append(file, data)
            seal(file)
            return run_blocking(self.ask(order, file, wait_while(is_wanted), read))

    def close(self) -> None:
        """Ends all processes. Running orders fail."""
        with self._lock:
            self._is_closed = True
            for process in self.idle:
                process.close()
            for process in self.busy:
                process.kill()
            self.idle.clear()

    async def _try_once(self, order: ProcessOrder, file: int, wait: Wait, read: Read[A, T]) -> T:
        process = self._take()
        has_ended = True
        try:
            result = await process.ask(order, file, wait, read)
            has_ended = False
            return result
        except RequestError:
            has_ended = False
            raise
        finally:
            self._give_back(process, has_ended)

    def _take(self) -> PoolProcess[A]:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is shutting down")
            while self.idle:
                process = self.idle.pop()
                if not process.has_ended:
                    break
                process.close()
            else:
                process = self._start()
            self.busy.add(process)
            return process

    def _give_back(self, process: PoolProcess, has_ended: bool) -> None:
        with self._lock:
            self.busy.remove(process)
            if has_ended or self._is_closed:
                process.close()
            else:
                self.idle.append(process)
            num_processes = len(self.idle) + len(self.busy) + has_ended
            if not process.is_filtered and not self._has_warned:
                self._has_warned = True
                logger.warning("this kernel filters no system calls: processes for media have limits only")
        self.warm_up(num_processes)


async def wait_on_loop(end: socket.socket, timeout_s: float) -> None:
    """Waits until the socket is readable, in a coroutine of an event loop."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(end, lambda: readable.done() or readable.set_result(None))
    try:
        async with asyncio.timeout(timeout_s):
            await readable
    finally:
        loop.remove_reader(end)


def wait_while(is_wanted: Callable[[], bool]) -> Wait:
    """Makes a wait that blocks its thread. Raises NotWantedError."""

    async def wait(end: socket.socket, timeout_s: float) -> None:
        ends_at = time.monotonic() + timeout_s
        while not _events(end, WANTED_EVERY_S):
            if not is_wanted():
                raise NotWantedError("nothing waits for this item any more")
            if time.monotonic() > ends_at:
                raise TimeoutError

    return wait


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine whose waits block."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it waits for an event loop")


def _events(end: socket.socket, timeout_s: float) -> int:
    """What `poll` says of the socket; 0 if nothing has happened in time."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return next((events for _, events in poll.poll(1000 * timeout_s)), 0)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(process, signal.SIGKILL)
