"""Reads the files of weights ahead of the loader, and says in the log how far it is.

transformers maps weight files, and a tensor is read where it is first touched: page by page, by the thread
that needs it. Here threads ask the kernel for the same bytes in large pieces, several at a time, so that the
disk is never idle and the loader finds its pages in memory. Nothing is copied, and nothing depends on it: a
byte that was not read ahead is read when it is touched.

    with Reading("the language half") as reading:       where weights are loaded
        reading.begin(pieces_of(ranges, …))              when it is known which tensors the half takes
        …                                                the loader

The ranks of a worker share a host, and so its page cache: each reads every n-th piece of what all of them
need. Threads of its own; they end with the `with`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NUM_THREADS = 4
PIECE_BYTES = 8 << 20
_STEP_BYTES = 1 << 20  # one byte of each is waited for
_LOG_EVERY_S = 5.0
_END_S = 10.0  # that a thread may need for the piece that it reads
_GB = 1e9


@dataclass(frozen=True)
class FilePart:
    """Bytes [begin, end) of a file."""

    file: Path
    begin: int
    end: int


class Reading:
    """All methods belong to the thread that loads the model."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        """what: for the log."""
        self._what, self._clock = what, clock
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self._left: Iterator[FilePart] = iter(())
        self._is_over = False
        self._num_read = self._total = 0
        self._began_at = self._said_at = 0.0

    def begin(self, pieces: Sequence[FilePart]) -> None:
        """Does not block. A later call does nothing."""
        if self.threads:
            return
        self._left, self._total = iter(pieces), sum(piece.end - piece.begin for piece in pieces)
        self._began_at = self._said_at = self._clock()
        self.threads = [
            threading.Thread(target=self._run, name="read weights", daemon=True)
            for _ in range(min(NUM_THREADS, len(pieces)))
        ]
        for thread in self.threads:
            thread.start()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for pieces that are being read; others are left to the loader."""
        with self._lock:
            self._is_over = True
        for thread in self.threads:
            thread.join(_END_S)

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            try:
                _read(piece)
            except OSError as error:  # which the loader meets as well
                logger.warning("%s: %s cannot be read ahead: %s", self._what, piece.file, error)
                return
            self._note(piece.end - piece.begin)

    def _next(self) -> FilePart | None:
        with self._lock:
            return None if self._is_over else next(self._left, None)

    def _note(self, num_bytes: int) -> None:
        with self._lock:
            self._num_read += num_bytes
            now, is_last = self._clock(), self._num_read == self._total
            if not is_last and now - self._said_at < _LOG_EVERY_S:
                return
            self._said_at = now
            rate = self._num_read / max(now - self._began_at, 1e-6)
            logger.info(
                "%s: read %.2f of %.2f GB, %.2f GB/s",
                self._what, self._num_read / _GB, self._total / _GB, rate / _GB,
            )  # fmt: skip


def pieces_of(
    ranges: Sequence[FilePart], *, rank: int = 0, num_ranks: int = 1, room: int | None = None
) -> list[FilePart]:
    """What this rank reads ahead of these parts of files, in the files' order. room: bytes of memory; what
    does not fit is left out, since it would push out what was read before. None: all fits."""
    pieces: list[FilePart] = []
    for whole in _joined(ranges):
        starts = range(whole.begin, whole.end, PIECE_BYTES)
        pieces += [FilePart(whole.file, at, min(at + PIECE_BYTES, whole.end)) for at in starts]
    if room is not None:
        pieces = pieces[: max(0, room) // PIECE_BYTES]
    return pieces[rank::num_ranks]


def _joined(ranges: Sequence[FilePart]) -> list[FilePart]:
    """In the files' order, neighbours as one."""
    joined: list[FilePart] = []
    for each in sorted(ranges, key=lambda part: (part.file, part.begin)):
        last = joined[-1] if joined else None
        if last is not None and last.file == each.file and last.end == each.begin:
            joined[-1] = FilePart(last.file, last.begin, each.end)
        else:
            joined.append(each)
    return joined


def _read(piece: FilePart) -> None:
    """Blocks until the bytes are in the page cache. Raises OSError."""
    descriptor = os.open(piece.file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, piece.begin, piece.end - piece.begin, os.POSIX_FADV_WILLNEED)
        for at in range(piece.begin, piece.end, _STEP_BYTES):
            os.pread(descriptor, 1, min(at + _STEP_BYTES, piece.end) - 1)
    finally:
        os.close(descriptor)
