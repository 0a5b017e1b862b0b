"""The states of hybrid models: what a layer with linear attention, a state space or a short convolution keeps
of all tokens before, in a fixed number of bytes a sequence.

A state lies in whole blocks of the KV memory, so that one pool, one kind of lease and one kind of write serve
both. Its bytes ignore what the blocks are made for: a segment of a block is one page or several of equal
size (the greatest common divisor of the segments' sizes), and each layer's states fill pages of their own.

A step reads a sequence's state in one place and writes the new one in another (`StateSpan`), so a step that
fails can be computed again. How mixers use them: `state_step`. Runs on the engine's thread. Owns no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout

_ALIGNMENT = 16  # bytes: of each state in its pages
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class StateSpan(msgspec.Struct, frozen=True):
    """Some successive new tokens of a sequence, and the blocks of its state before and after them."""

    num_tokens: int
    source: Sequence[int] = ()  # empty: these are the sequence's first tokens
    target: Sequence[int] = ()  # empty: nothing is kept


@dataclass(frozen=True)
class SpanTensors:
    """The S spans of a packed step and the places of their states, as kernels on a GPU take them: int32. The
    spans of a sequence are neighbours, in order; each begins with the state that the one before it leaves."""

    starts: Tensor  # [S + 1]: first token of each span; the last: number of tokens that are no padding
    firsts: Tensor  # [S]: the first span of the same sequence
    spans: Tensor  # [T]: which span each token belongs to; -1: padding
    source: Tensor  # [S, blocks]: of the state before a sequence's first span; -1: there is none
    target: Tensor  # [S, blocks]: of the state after each span; -1: it is not kept
    is_decode: bool  # every span is a sequence of one new token, or padding


@dataclass(frozen=True)
class PackedSpans:
    """The same on the CPU."""

    starts: np.ndarray
    firsts: np.ndarray
    spans: np.ndarray
    source: np.ndarray
    target: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[StateSpan]], num_blocks: int) -> PackedSpans:
        """num_blocks: of one state."""
        spans = [span for own in sequences for span in own]
        counts = np.array([span.num_tokens for span in spans])
        numbers = np.array([len(own) for own in sequences])
        firsts = np.repeat(numbers.cumsum() - numbers, numbers)
        source, target = (np.full((len(spans), num_blocks), -1, dtype=np.int32) for _ in range(2))
        for row, span in enumerate(spans):
            if span.source:
                source[row] = span.source
            if span.target:
                target[row] = span.target
        starts = np.concatenate([[0], counts.cumsum()])
        return cls(starts, firsts, np.repeat(np.arange(len(spans)), counts), source, target)


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor that a layer keeps of a sequence."""

    is_recurrent: bool  # else of a convolution
    number: int  # transformers': a layer may have several of a kind
    shape: tuple[int, ...]  # of one sequence
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_name]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class LayerStates(msgspec.Struct, frozen=True):
    """The states of one layer."""

    module: str  # the mixer's name in the text model
    layer_idx: int  # the layer's number
    tensors: tuple[StateTensor, ...]

    @property
    def places(self) -> list[tuple[StateTensor, slice]]:
        """Which of the layer's bytes each tensor has."""
        places, start = [], 0
        for tensor in self.tensors:
            places.append((tensor, slice(start, start + tensor.num_bytes)))
            start += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return places

    @property
    def num_bytes(self) -> int:
        return self.places[-1][1].stop


class StateLayout:
    """How a state lies in blocks of this layout."""

    def __init__(self, layers: Sequence[LayerStates], kv_layout: MemoryLayout):
        sizes = [segment.block_bytes for segment in kv_layout.segments]
        self.kv_layout = kv_layout
        self.page_bytes = math.gcd(*sizes)
        words = (torch.int64, torch.int32, torch.int16, torch.uint8)  # torch copies large ones faster
        self._word = next(word for word in words if self.page_bytes % word.itemsize == 0)
        per_segment = torch.tensor([size // self.page_bytes for size in sizes])
        segments = torch.arange(len(sizes)).repeat_interleave(per_segment)
        # of each page of a block: pages of a block in front of its segment, in the segment, before it there
        in_front = (per_segment.cumsum(0) - per_segment)[segments]
        index = torch.arange(len(segments)) - in_front
        self._rules = {torch.device("cpu"): torch.stack([in_front, per_segment[segments], index])}
        self.layers = layers
        self._pages: list[range] = []  # of each layer
        num_pages = 0
        for layer in layers:
            own = -(-layer.num_bytes // self.page_bytes)
            self._pages.append(range(num_pages, num_pages + own))
            num_pages += own
        self.num_blocks = -(-num_pages // len(segments))  # of one state

    def first_page(self, layer_number: int) -> int:
        """The layer's first page among those of a state."""
        return self._pages[layer_number].start

    def page_ids(self, blocks: Tensor, kv: BlockMemory) -> Tensor:
        """Blocks [B, blocks of a state] of B states, on the device → [B, pages] int64 there; -1 where
        a block is negative. Enqueues; the first call on a device copies to it."""
        device = kv.buffer.device
        if device not in self._rules:
            self._rules[device] = next(iter(self._rules.values())).to(device)
        in_front, per_segment, index = self._rules[device]
        own = blocks.long()[:, :, None]
        ids = own * per_segment + (in_front * kv.num_blocks + index)
        return torch.where(own < 0, -1, ids).flatten(1)

    def load(self, layer_number: int, pages: Tensor, kv: BlockMemory) -> Tensor:
        """pages [B, pages of a state] → [B, bytes] uint8 of one layer, a copy. layer_number: among the layers
        with states."""
        own = self._pages[layer_number]
        ids = pages[:, own.start : own.stop].flatten()
        return self._pages_of(kv).index_select(0, ids).view(torch.uint8).view(len(pages), -1)

    def store(self, layer_number: int, pages: Tensor, rows: Tensor, kv: BlockMemory) -> None:
        """The inverse of `load`."""
        own = self._pages[layer_number]
        ids = pages[:, own.start : own.stop].flatten()
        words = rows.view(self._word).view(len(ids), -1)
        self._pages_of(kv).index_copy_(0, ids, words)

    def _pages_of(self, kv: BlockMemory) -> Tensor:
        """[all pages, words]."""
        return kv.buffer.view(self._word).view(-1, self.page_bytes // self._word.itemsize)

    def step_bytes(self, num_tokens: int, num_sequences: int) -> int:
        """The most memory that a mixer takes in a step: for copies of a layer's states, and for rows of its
        convolution in float32. An upper estimate, not a measurement."""
        widths = [each.shape[0] for layer in self.layers for each in layer.tensors if not each.is_recurrent]
        states = 4 * self.page_bytes * max(map(len, self._pages))
        return num_sequences * states + 4 * num_tokens * max(widths, default=0) * torch.float32.itemsize

    def layer_bytes(self, layer_number: int) -> int:
        return len(self._pages[layer_number]) * self.page_bytes
