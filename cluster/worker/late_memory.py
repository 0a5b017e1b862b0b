"""Block memory that the workers of this host have been granted and whose pages are not allocated yet.

A worker checks at its start whether its memory is available, and is ready before the pages are allocated. The
kernel counts memory as available until then, so another worker that starts meanwhile must not count on it:

    with late_memory.granting() as promised:    no other process checks at the same time
        plan.check(available - promised)
        late_memory.promise(num_bytes)
    …
    late_memory.populate(memories)              when the worker is ready: a thread allocates the pages

A promise is a file with the number of bytes, under an flock: the kernel frees it when the process ends. A
thread of `populate` counts the number down.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.kvcache.memory import BlockMemory
from cluster.kvcache.populate import populate
from cluster.rpc.address import make_private

_PREFIX = "late-memory-"
_NUM_BYTES = ctypes.sizeof(ctypes.c_int64)


class LateMemory:
    """Memory of one process that is filled late. All methods belong to the thread that builds the worker, but
    for what the thread of `populate` does."""

    def __init__(self, folder: Path | None):
        """`folder`: common to the processes that share this host's memory, private to their user. None: on a
        device whose memory is allocated at once."""
        self._folder = folder
        self._promise: _Promise | None = None

    @contextmanager
    def granting(self) -> Iterator[int]:
        """Bytes that are promised, to this process or others, and not allocated yet."""
        if self._folder is None:
            yield 0
            return
        make_private(self._folder)
        with open(self._folder / "late-memory", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield sum(map(_bytes_left, self._folder.glob(f"{_PREFIX}*")))

    def promise(self, num_bytes: int) -> None:
        """Inside `granting`. May be repeated."""
        if self._folder is not None:
            if self._promise is None:
                self._promise = _Promise(self._folder)
            self._promise.left.value += num_bytes

    def populate(self, memories: Sequence[BlockMemory]) -> None:
        """Starts the thread that allocates what was promised; called once, with all of it. Does not block."""
        promise, self._promise = self._promise, None
        if promise is not None:
            threading.Thread(target=promise.keep, args=(memories,), name="populate", daemon=True).start()


class _Promise:
    """`left`: the number in the file, in bytes. It holds the file open, and so the flock."""

    def __init__(self, folder: Path):
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        with open(descriptor, "w+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(_NUM_BYTES)
            self.left = ctypes.c_int64.from_buffer(mmap.mmap(descriptor, _NUM_BYTES))
        self._path = Path(path)

    def keep(self, memories: Sequence[BlockMemory]) -> None:
        populate(memories, self.left)
        self._path.unlink(missing_ok=True)


def _bytes_left(path: Path) -> int:
    """0, and no file any more, for a process that has ended."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return max(0, ctypes.c_int64.from_buffer_copy(file.read(_NUM_BYTES)).value)
        path.unlink(missing_ok=True)
    return 0
