"""Processes in which media files are opened (`opener`), for a door (`surveyors`) and for an encoder
(`decoders`).

`OpenerPool` has the openers of one asker. An order takes an idle opener, or starts one:

* If an opener dies over a file, or breaks the protocol, another one tries the file once more. A file that
  ends two openers is refused.
* If an order takes too long, or is cancelled, its opener is killed at once.
* An opener that has ended is replaced at once, so that an idle one is ready before it is needed.

An opener is taken for hostile: it has read hostile files. Its answers have a fixed type and a bounded size.
Results are copied, or mapped when they are sealed, so that nothing can change them any more, and then
checked. Nothing outlives the asker's process.

Orders run on any thread. `ask` is a coroutine that waits in one place only: a door passes `wait_on_loop` and
awaits it, an encoder's thread passes a wait that blocks, and runs it with `run_blocking`.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from cluster.config.environment import bare_environment
from cluster.errors import ClusterError, MediaError, NotWantedError, RequestError, UnavailableError, from_info
from cluster.media.budget import too_slow
from cluster.media.opener import (
    MAX_COPIED_BYTES,
    MAX_MESSAGE_BYTES,
    SEALS,
    DecodeOrder,
    OpenerReady,
    Refused,
    Written,
    encoder,
)

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 2
START_TIMEOUT_S = 60.0  # importing FFmpeg and Pillow takes half a second on a busy core
FORK_TIMEOUT_S = 10.0  # of a server that has started an opener before, which takes milliseconds
GRACE_S = 1.0  # beyond the time limit, which the opener itself observes where its libraries allow it
WANTED_EVERY_S = 0.05  # how often a thread that waits asks whether the result is still wanted

T = TypeVar("T")
# Until the socket can be read. Raises TimeoutError, and whatever ends the order.
Wait = Callable[[socket.socket, float], Awaitable[None]]
# Shape and file of a result → the result. Raises ValueError for one that is not right.
Read = Callable[[tuple[int, ...], int], T]

_answers = msgspec.msgpack.Decoder(Written | Refused)


class OpenerEndedError(Exception):
    """The process has died or violated the protocol."""


class OpenerNotStartedError(OpenerEndedError):
    """It has read no file yet."""


class OpenerServer:
    """The process that forks openers. It is started with the first of them, and again when it has ended or no
    longer forks. Any thread."""

    def __init__(self, module: str = "cluster.media.opener"):
        self._module = module
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None  # while it serves
        self._socket: socket.socket | None = None
        self._has_forked = False

    def fork(self, end: socket.socket) -> int:
        """An opener serves at this end as soon as the server has imported everything. Does not wait. Returns
        the id of the server's process."""
        with self._lock:
            if self._socket is None or self.process is None or self.process.poll() is not None:
                self.process, self._socket = self._start()
            try:
                socket.send_fds(self._socket, [b"f"], [end.fileno()])
            except OSError:  # it has just ended, and is started again by the next order
                logger.warning("the process that starts openers of media files has ended")
            return self.process.pid

    @property
    def start_timeout_s(self) -> float:
        return FORK_TIMEOUT_S if self._has_forked else START_TIMEOUT_S

    def is_serving(self, pid: int) -> bool:
        """Whether this process still forks, as far as is known."""
        return self._socket is not None and self.process is not None and self.process.pid == pid

    def forked(self) -> None:
        """An opener has started."""
        self._has_forked = True

    def give_up(self, pid: int) -> None:
        """An opener of this process did not start. Ends the process with all its openers, unless another one
        has taken its place already."""
        with self._lock:
            if self.process is not None and self.is_serving(pid) and self.process.poll() is None:
                logger.warning("the process that starts openers of media files hangs: it is replaced")
                self.process.kill()
                self._socket = None

    def close(self) -> None:
        """Ends the server and its openers."""
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
                [sys.executable, "-m", self._module, str(theirs.fileno())],
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


@functools.cache
def opener_server() -> OpenerServer:
    """The one of this process."""
    return OpenerServer()


class Opener:
    """One process. Follows one order at a time. After an interrupted `ask` it can only be closed."""

    def __init__(self, server: OpenerServer):
        """Starts the process without waiting for it."""
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._server = server
        with theirs:
            self._server_pid = server.fork(theirs)
        self._socket.setblocking(False)
        self.process: int | None = None  # its descriptor, once it has started
        self._result = memory_file()
        self.is_filtered = True

    async def ask(self, order: DecodeOrder, file: int, wait: Wait, read: Read[T]) -> T:
        """`file`: sealed. Raises OpenerEndedError, TimeoutError for an order that takes too long, and
        RequestError for a file that cannot be used."""
        if self.process is None:
            await self._start_up(wait)
        try:
            socket.send_fds(self._socket, [encoder.encode(order)], [file, self._result])
            await wait(self._socket, order.timeout_s + GRACE_S)
            answer = _answers.decode(self._socket.recv(MAX_MESSAGE_BYTES))
            if isinstance(answer, Written):
                return read(answer.shape, self._result)
        except TimeoutError:
            raise
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise OpenerEndedError from error
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
        """Ends the process. A running `ask` raises OpenerEndedError."""
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
            self.is_filtered = msgspec.msgpack.decode(message, type=OpenerReady).is_filtered
            self._server.forked()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            if isinstance(error, TimeoutError):
                self._server.give_up(self._server_pid)
            raise OpenerNotStartedError from error


class OpenerPool:
    def __init__(self, start: Callable[[], Opener] = lambda: Opener(opener_server())):
        self._start = start
        self._lock = threading.Lock()
        self.idle: list[Opener] = []
        self.busy: set[Opener] = set()
        self._is_closed = False
        self._has_warned = False

    @property
    def num_busy(self) -> int:
        return len(self.busy)

    def warm_up(self, num_openers: int = 1) -> None:
        """Starts openers until there are so many, so that the first orders need not wait for them."""
        with self._lock:
            while not self._is_closed and len(self.idle) + len(self.busy) < num_openers:
                self.idle.append(self._start())

    async def ask(self, order: DecodeOrder, file: int, wait: Wait, read: Read[T]) -> T:
        """Does what `Opener.ask` does, but an opener that ends is replaced, and too long an order is a
        MediaError. May be cancelled at any time."""
        ends_at = time.monotonic() + order.timeout_s
        bounded = order
        not_started = UnavailableError("the process that opens media files did not start")
        reason: ClusterError = not_started
        for _ in range(NUM_ATTEMPTS):
            try:
                return await self._try_once(bounded, file, wait, read)
            except OpenerNotStartedError:
                reason = not_started
                continue
            except OpenerEndedError:
                reason = MediaError("cannot be decoded: the process that opens it dies")
                logger.warning("a process has ended over a media file (%s)", order.modality)
            except TimeoutError:
                raise MediaError(too_slow(order.timeout_s)) from None
            bounded = msgspec.structs.replace(order, timeout_s=max(0.0, ends_at - time.monotonic()))
        raise reason

    def close(self) -> None:
        """Ends all openers. Running orders fail."""
        with self._lock:
            self._is_closed = True
            for opener in self.idle:
                opener.close()
            for opener in self.busy:
                opener.kill()
            self.idle.clear()

    async def _try_once(self, order: DecodeOrder, file: int, wait: Wait, read: Read[T]) -> T:
        opener = self._take()
        has_ended = True
        try:
            result = await opener.ask(order, file, wait, read)
            has_ended = False
            return result
        except RequestError:
            has_ended = False
            raise
        finally:
            self._give_back(opener, has_ended)

    def _take(self) -> Opener:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the server is shutting down")
            while self.idle:
                opener = self.idle.pop()
                if not opener.has_ended:
                    break
                opener.close()
            else:
                opener = self._start()
            self.busy.add(opener)
            return opener

    def _give_back(self, opener: Opener, has_ended: bool) -> None:
        with self._lock:
            self.busy.remove(opener)
            if has_ended or self._is_closed:
                opener.close()
            else:
                self.idle.append(opener)
            num_openers = len(self.idle) + len(self.busy) + has_ended
            if not opener.is_filtered and not self._has_warned:
                self._has_warned = True
                logger.warning("this kernel filters no system calls: openers of media files have limits only")
        self.warm_up(num_openers)


def memory_file() -> int:
    """An empty file in memory. It is freed when all its descriptors and mappings are gone."""
    return os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@contextmanager
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


def check_size(file: int, num_bytes: int) -> None:
    """Raises ValueError if the file has another size, or is large and not sealed."""
    if os.fstat(file).st_size != num_bytes:
        raise ValueError("the result has another size")
    if num_bytes > MAX_COPIED_BYTES and fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("the result is not sealed")


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
