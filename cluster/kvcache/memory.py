"""Block memory: one flat buffer cut into equal blocks, the only memory that other workers ever write into.

A memory has S segments (KV: two per layer, K then V; features: one). Each segment is an array of `num_blocks`
blocks of `segment_bytes[s]` bytes. Segment-major order makes every layer's K (or V) one contiguous tensor, as
attention kernels need it, while a block id names the same token positions in all segments.

    address(s, b) = base + num_blocks * sum(segment_bytes[:s]) + b * segment_bytes[s]

Owns the bytes only. `BlockPool` knows which blocks are in use. `populate` allocates the pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class SegmentSpec:
    """One segment: per block, `rows` positions of shape `row_shape`."""

    rows: int  # token positions (or feature rows) per block
    row_shape: tuple[int, ...]  # KV: (num_kv_heads, head_dim); features: (feature_width,)
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        num_elements = self.rows
        for size in self.row_shape:
            num_elements *= size
        return num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class MemoryLayout:
    """What two workers must agree on before bytes are transferred."""

    segments: tuple[SegmentSpec, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all segments."""
        return sum(segment.block_bytes for segment in self.segments)

    @cached_property
    def spans(self) -> np.ndarray:
        """[segments, 2] uint64: bytes of one block before the segment, and in it."""
        sizes = np.array([segment.block_bytes for segment in self.segments], dtype=np.uint64)
        return np.stack([sizes.cumsum() - sizes, sizes], 1)

    @property
    def fingerprint(self) -> str:
        text = ";".join(f"{s.rows}x{s.row_shape}x{s.dtype}" for s in self.segments)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def feature_layout(feature_width: int, rows_per_block: int, dtype: torch.dtype) -> MemoryLayout:
    """How embedding rows lie in memory. Equal in encoders and prefill workers of one model."""
    return MemoryLayout((SegmentSpec(rows_per_block, (feature_width,), dtype),))


class BlockMemory:
    """The buffer and typed views into it.

    `segments[s]` is a view [num_blocks, rows, *row_shape] of segment s."""

    def __init__(self, layout: MemoryLayout, num_blocks: int, device: torch.device | str = "cpu"):
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = num_blocks * layout.block_bytes
        if torch.device(device).type == "cpu":
            self.buffer = on_huge_pages(num_bytes)
        else:
            self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.segments: list[torch.Tensor] = []
        start = 0
        for spec in layout.segments:
            end = start + num_blocks * spec.block_bytes
            view = self.buffer[start:end].view(spec.dtype).view(num_blocks, spec.rows, *spec.row_shape)
            self.segments.append(view)
            start = end
        self._runs = self._equal_segments()

    def _equal_segments(self) -> list[torch.Tensor]:
        """The same bytes, one view [segments, num_blocks, bytes] for each run of segments of one size."""
        runs, start = [], 0
        for size, group in itertools.groupby(spec.block_bytes for spec in self.layout.segments):
            count = len(list(group))
            end = start + count * self.num_blocks * size
            runs.append(self.buffer[start:end].view(count, self.num_blocks, size))
            start = end
        return runs

    def beside(self, layout: MemoryLayout, num_blocks: int) -> BlockMemory:
        """A new memory of the same kind, on the same device."""
        return BlockMemory(layout, num_blocks, self.buffer.device)

    @property
    def base_address(self) -> int:
        return self.buffer.data_ptr()

    @property
    def enqueues(self) -> bool:
        """Whether work on the bytes is enqueued and ends later (`mark`); on the CPU a call does it."""
        return self.buffer.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits until everything that this thread has enqueued on the device is in the buffer. Call it before
        bytes are sent. Does nothing on the CPU."""
        if self.enqueues:
            torch.cuda.current_stream(self.buffer.device).synchronize()

    def mark(self) -> Callable[[], bool] | None:
        """A function that says whether everything that this thread has enqueued so far is in the buffer. Any
        thread may call it; it does not wait. None: it is."""
        if not self.enqueues:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.buffer.device))
        return event.query

    def use_own_stream(self, priority: int = 0) -> None:
        """For a thread that moves bytes while another one computes: on CUDA, all that this thread enqueues
        from now on goes to this memory's device, which need not be the process's first, and to a stream of
        its own, so that it waits for no step of the model. `priority`: -1 starts its kernels before those
        that wait on other streams. Bytes that others have enqueued are there for it once `mark` or
        `synchronize` has said so. Does nothing on the CPU."""
        if self.enqueues:
            torch.cuda.set_device(self.buffer.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.buffer.device, priority=priority))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Block targets[i] becomes a copy of block sources[i], in every segment. On CUDA the copy is
        enqueued."""
        source_ids = torch.tensor(sources, device=self.buffer.device)
        target_ids = torch.tensor(targets, device=self.buffer.device)
        for segment in self.segments:
            segment.index_copy_(0, target_ids, segment.index_select(0, source_ids))

    def read_blocks(self, block_ids: Sequence[int]) -> np.ndarray:
        """A copy of these blocks on the CPU, [len(block_ids), layout.block_bytes] uint8. On CUDA it waits for
        this thread's stream."""
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.buffer.device)
        parts = [run[:, ids].transpose(0, 1).flatten(1) for run in self._runs]
        return torch.cat(parts, 1).cpu().numpy()

    def write_blocks(self, block_ids: Sequence[int], rows: np.ndarray) -> None:
        """Block block_ids[i] gets the bytes rows[i] of `read_blocks`. On CUDA the copy is enqueued."""
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.buffer.device)
        given, start = torch.from_numpy(rows).to(self.buffer.device), 0
        for run in self._runs:
            end = start + run.shape[0] * run.shape[2]
            run[:, ids] = given[:, start:end].view(len(ids), run.shape[0], -1).transpose(0, 1)
            start = end

    def descriptors(self, block_ids: Sequence[int], segment_ids: Sequence[int] | None = None) -> np.ndarray:
        """Address and length of each block in each segment: [len(segments) * len(block_ids), 2] uint64,
        segment-major."""
        return block_descriptors(self.layout, self.base_address, self.num_blocks, block_ids, segment_ids)


def on_huge_pages(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 zeros on the CPU, on huge pages if the kernel has them. Reading them misses the TLB
    less often, and the kernel's copies between processes, which look up every page, take two thirds of the
    time. A page is allocated when it is first written to (`populate`)."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
    memory = mmap.mmap(-1, num_bytes + mmap.PAGESIZE, flags=kind)  # a page after it keeps neighbours apart
    with contextlib.suppress(AttributeError, OSError):  # a system or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def block_descriptors(
    layout: MemoryLayout,
    base_address: int,
    num_blocks: int,
    block_ids: Sequence[int],
    segment_ids: Sequence[int] | None = None,
) -> np.ndarray:
    """`BlockMemory.descriptors` for a memory that may be in another process: pure arithmetic on the fields of
    a grant."""
    spans = layout.spans if segment_ids is None else layout.spans[list(segment_ids)]
    starts, sizes = spans[:, :1], spans[:, 1:]
    blocks = np.asarray(block_ids, dtype=np.uint64)
    rows = np.empty((len(spans), len(blocks), 2), dtype=np.uint64)
    rows[..., 0] = np.uint64(base_address) + starts * np.uint64(num_blocks) + blocks * sizes
    rows[..., 1] = sizes
    return rows.reshape(-1, 2)
