"""A checksum over bytes that lie scattered in memory, at about the speed of reading them.

The bytes of all descriptors in their order make one stream of 64-bit little-endian words, the last filled up with zeros.
The words go round `STREAMS` streams, each with a state of its own:

    state[i] = halves swapped((state[i] xor word) * M)          i = word's number mod STREAMS

and the states, folded in order by the same step into a state that starts from the number of bytes, make the sum. The step is one to
one in the state and in the word, so a single changed word, hence a single flipped bit, always changes the sum; other changes
(words or blocks exchanged, bytes moved from one descriptor to another place in the stream) escape with a chance of about
2**-64. How the stream is cut into descriptors does not matter. Against accidents, not against adversaries.

Native where there is a compiler, else numpy: the same value. Any thread; the native call releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from cluster.model.cpu import library

STREAMS = 256
_MULTIPLIER = 0x9E3779B97F4A7C15
_STEP = 0xBF58476D1CE4E5B9
_WORD_MASK = 2**64 - 1


def checksum(descriptors: np.ndarray) -> int:
    """descriptors [n, 2] uint64: address and bytes, of memory of this process that nobody writes meanwhile. 64 bits."""
    native = _native()
    return numpy_checksum(descriptors) if native is None else native_checksum(descriptors, native)


def native_checksum(descriptors: np.ndarray, native: ctypes.CDLL) -> int:
    extents = np.ascontiguousarray(descriptors, dtype=np.uint64).reshape(-1, 2)
    return native.codec_checksum(extents.ctypes.data, len(extents))


def numpy_checksum(descriptors: np.ndarray) -> int:
    """Copies the bytes; some 20 times slower than the native one."""
    parts = [ctypes.string_at(int(address), int(size)) for address, size in descriptors]
    stream = b"".join(parts)
    padding = -len(stream) % 8
    words = np.frombuffer(stream + bytes(padding), dtype="<u8")
    states = np.arange(1, STREAMS + 1, dtype=np.uint64) * np.uint64(_STEP)
    multiplier, half = np.uint64(_MULTIPLIER), np.uint64(32)
    for start in range(0, len(words), STREAMS):
        row = words[start : start + STREAMS]
        products = (states[: len(row)] ^ row) * multiplier
        states[: len(row)] = (products << half) | (products >> half)
    return _folded(states.tolist(), len(stream))


def declared(cdll: ctypes.CDLL) -> ctypes.CDLL:
    cdll.codec_checksum.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    cdll.codec_checksum.restype = ctypes.c_uint64
    return cdll


@cache
def _native() -> ctypes.CDLL | None:
    kernels = library.load()
    return declared(kernels.cdll) if kernels else None


def _folded(states: list[int], num_bytes: int) -> int:
    total = num_bytes * _STEP & _WORD_MASK
    for state in states:
        product = (total ^ state) * _MULTIPLIER & _WORD_MASK
        total = (product << 32 | product >> 32) & _WORD_MASK
    total = (total ^ total >> 32) * _STEP & _WORD_MASK
    return total ^ total >> 29
