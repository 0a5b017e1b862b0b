"""Allocates the pages of block memories. A new `BlockMemory` has none: each is allocated when it is first
written to, which takes milliseconds on some hosts. `populate` allocates all of them, while other threads and
processes use the memories: it changes no byte.

Any thread.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_int64, c_void_p
from pathlib import Path

from cluster.kvcache.memory import BlockMemory
from cluster.native import library as native

SOURCES = Path(__file__).parent
PIECE_BYTES = 2 << 20  # a huge page
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it

_libc = ctypes.CDLL(None)


def populate(memories: Sequence[BlockMemory], left: ctypes.c_int64) -> None:
    """Blocks until all pages are there. Subtracts what it has done from `left`, in bytes. The native code
    runs where a core has nothing else to do. Without it the pages are allocated with this thread's
    priority."""
    found = list(pieces(memories))
    library = native.load(SOURCES)
    if library is None:
        for address, num_bytes in found:
            start = address // mmap.PAGESIZE * mmap.PAGESIZE
            _libc.madvise(c_void_p(start), ctypes.c_size_t(address + num_bytes - start), _MADV_POPULATE_WRITE)
            left.value -= num_bytes
        return
    function = library.cdll.populate
    function.argtypes = (POINTER(c_void_p), POINTER(c_int64), c_int64, POINTER(c_int64))
    function.restype = None
    starts = (c_void_p * len(found))(*(address for address, _ in found))
    sizes = (c_int64 * len(found))(*(num_bytes for _, num_bytes in found))
    function(starts, sizes, len(found), ctypes.byref(left))


def pieces(memories: Sequence[BlockMemory]) -> Iterator[tuple[int, int]]:
    """(address, bytes). In each segment one after the other, and all segments in turn: the pool gives out the
    lowest free blocks first, and a block has a place in every segment."""
    segments = [
        (segment.data_ptr(), segment.numel() * segment.element_size())
        for memory in memories
        for segment in memory.segments
    ]
    for start in range(0, max((size for _, size in segments), default=0), PIECE_BYTES):
        for address, size in segments:
            if start < size:
                yield address + start, min(PIECE_BYTES, size - start)
