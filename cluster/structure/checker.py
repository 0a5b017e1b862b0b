"""A door's check of structures: what no worker could hold is refused before anything is generated.

Each new structure is compiled once, in a process of its own (`check_process`), and what came of it is kept.
Tenants take turns. What is not done in a moment goes to a second process, so that slow structures do not
hold up quick ones, also where all clients are one tenant. Each process checks one structure at a time. It
starts with the first structure that it gets; if it ends, the next structure starts another one.

`check` belongs to one event loop. One thread talks to each process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from cluster.config.environment import bare_environment
from cluster.errors import StructureError, UnavailableError, UnsupportedError
from cluster.media.slots import FairSlots
from cluster.structure.check_process import CPU_S, HEADER_BYTES, WALL_S, Checked, Order, framed
from cluster.structure.vocabulary import VocabularySource
from cluster.types.structure import Structure

logger = logging.getLogger(__name__)

QUICK_CPU_S = 0.1  # of processor time in a structure's first turn; ordinary ones take 5 to 60 ms
MAX_LOGGED = 20  # keywords that are left out
START_TIMEOUT_S = 60.0  # a large vocabulary takes a second on an idle machine
ANSWER_TIMEOUT_S = WALL_S + 5.0
WAIT_TIMEOUT_S = 60.0  # for the structures of other requests
MAX_KEPT = 1024
MAX_KEPT_CHARS = 8 << 20  # of all structures whose answer is kept

Key = tuple[str, str]


class CheckProcess:
    """The process that checks. Used on one thread, `close` on any."""

    def __init__(self, load: Callable[[], VocabularySource]):
        self._load = load
        self._source: VocabularySource | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def ask(self, order: Order) -> Checked:
        """Raises UnavailableError."""
        for _ in range(2):
            if self._is_closed:
                break
            try:
                return self._exchange(self._socket or self._start(), order)
            except (OSError, EOFError, msgspec.DecodeError):
                self._end()
        raise UnavailableError("the process that compiles structures does not answer", retry_after_s=5.0)

    def close(self) -> None:
        """Ends the process for good. A running `ask` raises."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        end, process = self._socket, self._process
        self._socket = self._process = None
        if end is not None:
            end.close()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> socket.socket:
        self._source = self._source or self._load()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cluster.structure.check_process", str(theirs.fileno())],
                env=bare_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C must reach the door only
            )
        self._socket = ours
        ours.settimeout(START_TIMEOUT_S)
        if (error := self._exchange(ours, self._source).error) is not None:
            self._end()
            raise UnsupportedError(error)
        ours.settimeout(ANSWER_TIMEOUT_S)
        return ours

    @staticmethod
    def _exchange(end: socket.socket, message: VocabularySource | Order) -> Checked:
        end.sendall(framed(message))
        return msgspec.msgpack.decode(
            _read(end, int.from_bytes(_read(end, HEADER_BYTES), "little")), type=Checked
        )


def _read(end: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = end.recv(num_bytes - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


MakeProcess = Callable[[Callable[[], VocabularySource]], CheckProcess]


class StructureChecker:
    def __init__(self, load: Callable[[], VocabularySource], make_process: MakeProcess = CheckProcess):
        """`load` is called once, off the event loop."""
        process = functools.partial(make_process, functools.cache(load))
        self._quick, self._slow = _CheckQueue(process(), QUICK_CPU_S), _CheckQueue(process(), CPU_S)
        self._known: OrderedDict[Key, Checked] = OrderedDict()
        self._num_chars = 0
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._quick.close()
        self._slow.close()

    async def check(self, structure: Structure, tenant: str) -> Structure:
        """The structure that is held: the same one, unless it is loose. Raises StructureError, or
        UnavailableError if it cannot be checked now. May be cancelled."""
        if self._is_closed:
            raise UnavailableError("the server is shutting down")
        if structure.key not in self._known:
            try:
                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    if not await self._try_check(structure, tenant, self._quick):
                        await self._try_check(structure, tenant, self._slow)
            except TimeoutError:
                raise UnavailableError("too many structures wait to be compiled", retry_after_s=5.0) from None
        self._known.move_to_end(structure.key)
        checked = self._known[structure.key]
        if checked.error is not None:
            raise StructureError(f"{structure.param}: {checked.error}", param=structure.param)
        if checked.left_out:
            what = ", ".join(checked.left_out[:MAX_LOGGED])
            logger.info("%s: not held, as nothing asks for it strictly: %s", structure.param, what[:2000])
        return structure if checked.text is None else replace(structure, text=checked.text)

    async def _try_check(self, structure: Structure, tenant: str, queue: _CheckQueue) -> bool:
        """False: it takes more time than it has there."""
        async with queue.slots.slot(tenant):
            if structure.key not in self._known:
                checked = await queue.ask(structure)
                if checked.is_out_of_time and queue is self._quick:
                    return False
                self._keep(structure.key, checked)
            return True

    def _keep(self, key: Key, checked: Checked) -> None:
        self._known[key] = checked
        self._num_chars += len(key[1])
        while len(self._known) > MAX_KEPT or (self._num_chars > MAX_KEPT_CHARS and len(self._known) > 1):
            oldest, _ = self._known.popitem(last=False)
            self._num_chars -= len(oldest[1])


class _CheckQueue:
    """A process, and those that wait for it."""

    def __init__(self, process: CheckProcess, cpu_s: float):
        """`cpu_s`: processor time that each structure has."""
        self.slots = FairSlots(1, 1)
        self._process = process
        self._cpu_s = cpu_s
        self._thread = ThreadPoolExecutor(1, "structure-check")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    async def ask(self, structure: Structure) -> Checked:
        """Raises UnavailableError."""
        order = Order(structure, self._cpu_s)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._process.ask, order)
