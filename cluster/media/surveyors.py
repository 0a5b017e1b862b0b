"""A door's surveyor processes. Files are opened there (`surveyor`) and not in the door, whose event loop and
streams stay unaffected.

Steps of a survey: it waits for a slot among all tenants' surveys → takes an idle process, or starts one →
sends order and bytes → receives the answer.

* If a survey is cancelled or takes too long, its process is killed at once. The next survey starts another
  one.
* If a process dies over a file, another process tries the file once more. A file that ends two processes is
  refused.
* Long surveys (clips, sounds, whole decodes) leave one process for headers of images, which take a
  millisecond, and one for other tenants.

Belongs to one event loop. Processes start when they are needed; `warm_up` starts the first one early.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from cluster import overload
from cluster.config.environment import child_environment
from cluster.errors import MediaError, OverloadedError, UnavailableError, from_info
from cluster.media.budget import too_slow
from cluster.media.slots import FairSlots
from cluster.media.surveyor import HEADER_BYTES, SurveyAnswer, Surveyed, SurveyOrder, SurveyRefused, framed
from cluster.types.media import Modality

NUM_PROCESSES = 4
NUM_PROCESSES_PER_TENANT = 3
NUM_LONG = 3
NUM_LONG_PER_TENANT = 2
START_TIMEOUT_S = 60.0  # importing FFmpeg and Pillow takes half a second on a busy core
WAIT_TIMEOUT_S = 60.0  # for a slot
GRACE_S = 1.0  # beyond the time limit, which the process itself observes where its libraries allow it
MAX_ANSWER_BYTES = 64 << 20
RETRY_AFTER_S = 5.0

_decoder = msgspec.msgpack.Decoder(SurveyAnswer)


@dataclass
class DecodeTime:
    """Seconds that all surveys of one request may take together."""

    left_s: float

    def bound(self, order: SurveyOrder) -> SurveyOrder:
        """The order with at most the remaining time. Raises MediaError if none is left."""
        if self.left_s <= 0:
            raise MediaError("the media of this request take too long to decode")
        return msgspec.structs.replace(order, timeout_s=min(order.timeout_s, self.left_s))


class SurveyorEndedError(Exception):
    """The process has died or violated the protocol."""


class SurveyorProcess:
    """Does one survey at a time. After an interrupted `ask` the process can only be closed."""

    def __init__(self, module: str = "cluster.media.surveyor") -> None:
        """Starts the process without waiting for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C must reach the door only
            )
        ours.setblocking(False)
        self._socket = ours
        self._is_ready = False

    async def ask(self, order: SurveyOrder, data: bytes) -> SurveyAnswer:
        """Raises SurveyorEndedError, TimeoutError for a survey that takes too long, UnavailableError if the
        process does not start."""
        loop = asyncio.get_running_loop()
        try:
            await self._start_up()
            async with asyncio.timeout(order.timeout_s + GRACE_S):
                await loop.sock_sendall(self._socket, framed(order))
                await loop.sock_sendall(self._socket, data)
                return _decoder.decode(await self._receive())
        except (OSError, msgspec.DecodeError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise SurveyorEndedError from error

    def kill(self) -> None:
        """Ends the process. A running `ask` raises SurveyorEndedError."""
        self._process.kill()

    def close(self) -> None:
        """Do not call it while `ask` runs."""
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, name="reap-surveyor", daemon=True).start()

    async def _start_up(self) -> None:
        if self._is_ready:
            return
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._receive()
        except (OSError, TimeoutError, SurveyorEndedError) as error:
            raise UnavailableError("the process that opens media files did not start") from error
        self._is_ready = True

    async def _receive(self) -> bytes:
        size = int.from_bytes(await self._read(HEADER_BYTES), "little")
        if size > MAX_ANSWER_BYTES:
            raise SurveyorEndedError
        return await self._read(size)

    async def _read(self, num_bytes: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < num_bytes:
            piece = await loop.sock_recv(self._socket, num_bytes - len(data))
            if not piece:
                raise SurveyorEndedError
            data += piece
        return bytes(data)


class SurveyorPool:
    def __init__(self, start: Callable[[], SurveyorProcess] = SurveyorProcess):
        self._start = start
        self._idle: list[SurveyorProcess] = []
        self._busy: set[SurveyorProcess] = set()
        self._is_closed = False
        self._long = FairSlots(NUM_LONG, NUM_LONG_PER_TENANT)
        self._all = FairSlots(NUM_PROCESSES, NUM_PROCESSES_PER_TENANT)

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    def warm_up(self) -> None:
        """Starts a process early, so that the first client need not wait for it."""
        if not self._idle and not self._busy:
            self._idle.append(self._start())

    async def survey(self, tenant: str, order: SurveyOrder, data: bytes, time: DecodeTime) -> Surveyed:
        """Raises MediaError, which does not name the item, OverloadedError and UnavailableError. May be
        cancelled at any time."""
        async with AsyncExitStack() as slots:
            work, limits = "processes that open long media", (NUM_LONG, NUM_LONG_PER_TENANT)
            try:
                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    if order.modality is not Modality.IMAGE or order.decodes:
                        await slots.enter_async_context(self._long.slot(tenant))
                    work, limits = "processes that open media", (NUM_PROCESSES, NUM_PROCESSES_PER_TENANT)
                    await slots.enter_async_context(self._all.slot(tenant))
            except TimeoutError:
                text = overload.no_slot(work, WAIT_TIMEOUT_S, *limits)
                raise OverloadedError(text, retry_after_s=RETRY_AFTER_S) from None
            for _ in range(2):
                bounded = time.bound(order)
                try:
                    answer = await self._ask(bounded, data, time)
                except SurveyorEndedError:
                    continue
                except TimeoutError:
                    raise MediaError(too_slow(bounded.timeout_s)) from None
                if isinstance(answer, SurveyRefused):
                    raise from_info(answer.error)
                return answer
            raise MediaError("cannot be decoded: the process that opens it dies")

    def close(self) -> None:
        """Ends all processes. Running surveys fail."""
        self._is_closed = True
        for process in self._idle:
            process.close()
        for process in self._busy:
            process.kill()
        self._idle.clear()

    async def _ask(self, order: SurveyOrder, data: bytes, time: DecodeTime) -> SurveyAnswer:
        if self._is_closed:
            raise UnavailableError("the server is shutting down")
        process = self._idle.pop() if self._idle else self._start()
        self._busy.add(process)
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            answer = await process.ask(order, data)
        except BaseException:
            self._busy.remove(process)
            process.close()
            if not self._is_closed:
                self.warm_up()
            raise
        finally:
            time.left_s -= loop.time() - began_at
        self._busy.remove(process)
        self._idle.append(process)
        return answer
