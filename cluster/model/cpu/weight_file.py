"""A file of packed weights: written once, mapped read-only by every worker of the host that needs it.

    [matrices and parameters, each at a cache line's start] [zeros up to a huge page] [header: JSON] [tail]

The tail says where the header begins and holds its hash; the header holds a checksum of each piece of the
data. `read_weights` checks all of them before a weight is used, because files are written without waiting for
the disk: after a power loss a file may have its name but not its bytes. A file that was checked since this
machine was booted, and not written to since, has a mark that says so and is not checked again.

The page cache is the one copy that all workers share. Written in whole huge pages, it lies on huge pages
where the file system has them (seen on ext4 with Linux 6.18, not on tmpfs). The mapping is locked in
memory if the user may lock so much; otherwise the kernel may drop pages and read them again.

A mapped file is deleted, never truncated or written to: reading behind the end of a file ends the process.
Runs on the thread that loads the model; the checksums on some more.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from cluster.model.cpu.weight_source import (
    ALIGNMENT,
    MappedWeights,
    Matrix,
    RecordedWeights,
    Replaced,
)

_PIECE_BYTES = 32 << 20  # written at once, with one checksum; a multiple of a huge page
_HUGE_PAGE_BYTES = 2 << 20
_TAIL = struct.Struct("<QQ32s16s")  # header's first byte, its length, its SHA-256, the format
_FORMAT = b"epdg weights  1\n"
_NUM_THREADS = 4
_MARK = "user.epdg.checked"  # an extended attribute: goes with the file, and a copy has another inode
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)


class DamagedFile(Exception):
    """The file is not what was written, or not safe to map."""


def num_bytes_of(weights: RecordedWeights) -> int:
    """At least the size of the file."""
    tensors = [tensor for _, tensor in weights.parameters]
    for replaced in weights.replaced.values():
        for matrix in replaced.matrices:
            tensors += [matrix.packed, matrix.scales, matrix.sums]
    return sum(tensor.numel() * tensor.element_size() + ALIGNMENT for tensor in tensors) + _HUGE_PAGE_BYTES


def write_weights(path: Path, weights: RecordedWeights) -> None:
    """Only the owner can read the file. Raises OSError, e.g. for a full disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        writer = _PieceWriter(file)
        header = {
            "parameters": [
                [names, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), writer.write(tensor)]
                for names, tensor in weights.parameters
            ],
            "replaced": {
                name: [
                    dict(replaced.settings),
                    [[writer.write(t) for t in (m.packed, m.scales, m.sums)] for m in replaced.matrices],
                ]
                for name, replaced in weights.replaced.items()
            },
            "absent": {
                name: [list(shape), str(dtype).removeprefix("torch.")]
                for name, (shape, dtype) in weights.absent.items()
            },
            "notes": dict(weights.notes),
        }
        header["checksums"] = writer.finish()
        text = json.dumps(header).encode()
        _write_all(file, text)
        _write_all(file, _TAIL.pack(writer.num_written, len(text), hashlib.sha256(text).digest(), _FORMAT))


def read_weights(path: Path, *, is_checked: bool) -> MappedWeights:
    """Maps the file. is_checked: this process has just written it. Raises DamagedFile for a file that is
    damaged or that others may write to, OSError if it cannot be read. Blocks: the first time since the
    machine was booted it reads all bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise DamagedFile("others may write to it")
        header, data_bytes = _read_header(file, status.st_size)
        memory = _Mapping(descriptor, data_bytes)
        mark = f"{_boot_id()} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()
        with _locked(descriptor):  # workers that start together check once
            if not _has_mark(descriptor, mark):
                if not is_checked:
                    memory.check(header["checksums"])
                with suppress(OSError):  # a file system without attributes: it is checked at each start
                    os.setxattr(descriptor, _MARK, mark)
    return MappedWeights(
        parameters=[
            (names, memory.tensor(start, getattr(torch, dtype), shape))
            for names, dtype, shape, (start, _) in header["parameters"]
        ],
        absent={name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in header["absent"].items()},
        replaced={
            name: Replaced(settings, [memory.matrix(*places) for places in matrices])
            for name, (settings, matrices) in header["replaced"].items()
        },
        notes=header["notes"],
        evictable_bytes=0 if memory.is_locked else data_bytes,
    )


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Freed at once and not with the descriptor, of which the mapping keeps a copy."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _has_mark(descriptor: int, mark: bytes) -> bool:
    try:
        return os.getxattr(descriptor, _MARK) == mark
    except OSError:
        return False


def _boot_id() -> str:
    """Without one, as if each start were the first after a boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(time.monotonic_ns())


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the number of bytes before it."""
    if size < _TAIL.size:
        raise DamagedFile("it is too short")
    file.seek(size - _TAIL.size)
    start, length, digest, form = _TAIL.unpack(file.read(_TAIL.size))
    if form != _FORMAT or start % _HUGE_PAGE_BYTES or start + length + _TAIL.size != size:
        raise DamagedFile("its end is missing")
    file.seek(start)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise DamagedFile("its header is damaged")
    return json.loads(text), start


class _PieceWriter:
    """Writes whole pieces: pages that are written together lie together in memory."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._piece = bytearray(_PIECE_BYTES)
        self._used = 0
        self._checksums: list[int] = []
        self.num_written = 0  # bytes

    def write(self, tensor: Tensor) -> tuple[int, int]:
        """Where the tensor begins in the file, and its bytes."""
        self._add(bytes(-self._used % ALIGNMENT))
        start = self.num_written + self._used
        content = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        self._add(content)
        return start, len(content)

    def finish(self) -> list[int]:
        """The checksums of all pieces."""
        self._add(bytes(-self._used % _HUGE_PAGE_BYTES))
        self._flush()
        return self._checksums

    def _add(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:
            room = min(len(view), _PIECE_BYTES - self._used)
            self._piece[self._used : self._used + room] = view[:room]
            self._used, view = self._used + room, view[room:]
            if self._used == _PIECE_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._used:
            piece = memoryview(self._piece)[: self._used]
            _write_all(self._file, piece)
            self._checksums.append(zlib.crc32(piece))
            self.num_written, self._used = self.num_written + self._used, 0


def _write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


class _Mapping:
    """The data of an open file in this process. Lives as long as a tensor in it."""

    def __init__(self, descriptor: int, num_bytes: int):
        if num_bytes == 0:
            raise DamagedFile("it is empty")
        # at an address where huge pages fit: the kernel aligns large mappings of files that have them
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        address, size = ctypes.c_void_p(self._bytes.ctypes.data), ctypes.c_size_t(num_bytes)
        _libc.madvise(address, size, mmap.MADV_HUGEPAGE)  # each of these may fail: it is only slower then
        self.is_locked = _libc.mlock(address, size) == 0
        if not self.is_locked:
            _libc.madvise(address, size, _POPULATE_READ)

    def check(self, checksums: list[int]) -> None:
        """Raises DamagedFile."""
        pieces = range(0, len(self._bytes), _PIECE_BYTES)

        def checksum(start: int) -> int:
            return zlib.crc32(self._bytes[start : start + _PIECE_BYTES])

        with ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1)) as threads:
            if list(threads.map(checksum, pieces)) != checksums:
                raise DamagedFile("its bytes are not those that were written")

    def tensor(self, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        # torch knows no read-only tensors and would warn; a write into this one ends the process
        view_type: Any = type("View", (ctypes.c_uint8 * num_bytes,), {})
        view = view_type.from_address(self._bytes.ctypes.data + start)
        view.memory = self._bytes  # the tensor keeps the view, the view the mapping
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def matrix(self, packed: list[int], scales: list[int], sums: list[int]) -> Matrix:
        return Matrix(
            self.tensor(packed[0], torch.uint8, [packed[1]]),
            self.tensor(scales[0], torch.float32, [scales[1] // 4]),
            self.tensor(sums[0], torch.int32, [sums[1] // 4]),
        )
