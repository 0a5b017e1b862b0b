"""Where the blocks of a second tier lie: slots of equal size, in host memory or in a file.

A slot holds a record, which says itself whether it is whole and which block it is:

    length of the block's name (1 byte) | name, zeros (47) | checksum of name and KV (16) | KV, as
    `BlockMemory.read_blocks` has it

So a file needs no index, no order of writes and no repair: a record that was torn, changed or never written
is no record. Used by one thread; a file also by one worker, which holds a lock on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from cluster.kvcache.hashing import MAX_NAME_BYTES

_NAME_BYTES, _CHECKSUM_BYTES = 48, 16
_HEADER_BYTES = _NAME_BYTES + _CHECKSUM_BYTES


class Slots(Protocol):
    num_slots: int

    def names(self) -> Iterator[tuple[int, bytes]]:
        """Slots that had a record when they were opened, and its block's name. Blocks."""
        ...

    def write(self, slot: int, record: np.ndarray) -> None:
        """Blocks. Raises OSError; then the slot holds no record."""
        ...

    def read(self, slot: int) -> np.ndarray:
        """Valid until the slot is written. Blocks. Raises OSError."""
        ...

    def clear(self) -> None:
        """No slot holds a record any more. Raises OSError."""
        ...

    def close(self) -> None: ...


class HostSlots:
    def __init__(self, max_bytes: int, block_bytes: int):
        record_bytes = _HEADER_BYTES + block_bytes
        self.num_slots = max_bytes // record_bytes
        # pages of slots that were never written take no memory
        self._records = np.zeros((self.num_slots, record_bytes), np.uint8)

    def names(self) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def write(self, slot: int, record: np.ndarray) -> None:
        self._records[slot] = record

    def read(self, slot: int) -> np.ndarray:
        return self._records[slot]

    def clear(self) -> None:
        """What no index names is not read."""

    def close(self) -> None:
        pass


class FileSlots:
    def __init__(self, folder: Path, max_bytes: int, block_bytes: int):
        """Opens the first file of the folder that no other worker uses, with what is in it. All files of a
        folder must be of one model, one layout and one block size. Raises OSError."""
        self._record_bytes = _HEADER_BYTES + block_bytes
        self.num_slots = max_bytes // self._record_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(f"others may write to {folder}")
        self._file = next(
            file for number in itertools.count() if (file := _try_lock(folder / f"{number}.kv"))
        )
        if os.fstat(self._file).st_size > self.num_slots * self._record_bytes:
            os.ftruncate(self._file, self.num_slots * self._record_bytes)

    def names(self) -> Iterator[tuple[int, bytes]]:
        for slot in range(os.fstat(self._file).st_size // self._record_bytes):
            field = os.pread(self._file, _NAME_BYTES, slot * self._record_bytes)
            if len(field) == _NAME_BYTES and 0 < field[0] <= MAX_NAME_BYTES:
                yield slot, field[1 : 1 + field[0]]

    def write(self, slot: int, record: np.ndarray) -> None:
        if os.pwrite(self._file, record.data, slot * self._record_bytes) < len(record):
            raise OSError("the disk is full")

    def read(self, slot: int) -> np.ndarray:
        record = os.pread(self._file, self._record_bytes, slot * self._record_bytes)
        return np.frombuffer(record, np.uint8)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        os.close(self._file)


def make_record(name: bytes, data: np.ndarray) -> np.ndarray:
    """`data`: the block's KV, [block bytes] uint8."""
    return np.concatenate([np.frombuffer(_header(name, data), np.uint8), data])


def read_record(name: bytes, record: np.ndarray) -> np.ndarray | None:
    """The block's KV. None: this is not a whole record of this block."""
    data, header = record[_HEADER_BYTES:], record[:_HEADER_BYTES].tobytes()
    return data if header == _header(name, data) else None


def _header(name: bytes, data: np.ndarray) -> bytes:
    checksum = hashlib.blake2b(data.data, digest_size=_CHECKSUM_BYTES, key=name).digest()
    return bytes([len(name)]) + name.ljust(_NAME_BYTES - 1, b"\0") + checksum


def _try_lock(path: Path) -> int | None:
    """An open file that this process alone uses. None: another worker uses it. The lock ends with the file
    or the process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file
