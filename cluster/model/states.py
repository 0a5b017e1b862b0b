"""The states of hybrid models: what a layer with linear attention, a state space or a short convolution keeps
of all tokens before, in a fixed number of bytes a sequence.

A state lies in whole blocks of the KV memory, so that one pool, one kind of lease and one kind of write serve
both. Its bytes ignore what the blocks are made for: a segment of a block is one page or several of equal
size (the greatest common divisor of the segments' sizes), and each layer's states fill pages of their own.

A step reads a sequence's state in one place and writes the new one in another (`StateSpan`), so a step that
fails can be computed again.

The mixers are transformers' own. A `StatefulForward` stands in front of each: it calls its mixer once for all
spans of one length, with the cache object that transformers knows.
Runs on the engine's thread. Owns no memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.step_adapters import StepAdapters

# by which names a mixer takes the cache
_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value", "cache")
_ALIGNMENT = 16  # bytes: of each state in its pages
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class StateSpan(msgspec.Struct, frozen=True):
    """Some successive new tokens of a sequence, and the blocks of its state before and after them."""

    num_tokens: int
    source: Sequence[int] = ()  # empty: these are the sequence's first tokens
    target: Sequence[int] = ()  # empty: nothing is kept


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
        self._page_bytes = math.gcd(*sizes)
        words = (torch.int64, torch.int32, torch.int16, torch.uint8)  # torch copies large ones faster
        self._word = next(word for word in words if self._page_bytes % word.itemsize == 0)
        per_segment = torch.tensor([size // self._page_bytes for size in sizes])
        segments = torch.arange(len(sizes)).repeat_interleave(per_segment)
        # of each page of a block: pages of a block in front of its segment, in the segment, before it there
        self._in_front = (per_segment.cumsum(0) - per_segment)[segments]
        self._per_segment = per_segment[segments]
        self._index = torch.arange(len(segments)) - self._in_front
        self.layers = layers
        self._pages: list[range] = []  # of each layer
        num_pages = 0
        for layer in layers:
            own = -(-layer.num_bytes // self._page_bytes)
            self._pages.append(range(num_pages, num_pages + own))
            num_pages += own
        self.num_blocks = -(-num_pages // len(segments))  # of one state

    def page_ids(self, tables: Sequence[Sequence[int]], kv: BlockMemory) -> Tensor:
        """Blocks of B states → [B, pages] int64 on the memory's device."""
        blocks = torch.tensor(tables, dtype=torch.int64)[:, :, None]
        ids = self._in_front * kv.num_blocks + blocks * self._per_segment + self._index
        return ids.flatten(1).to(kv.buffer.device)

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
        return kv.buffer.view(self._word).view(-1, self._page_bytes // self._word.itemsize)

    def step_bytes(self, num_tokens: int, num_sequences: int) -> int:
        """The most memory that a mixer takes in a step: for copies of a layer's states, and for rows of its
        convolution in float32. An upper estimate, not a measurement."""
        widths = [each.shape[0] for layer in self.layers for each in layer.tensors if not each.is_recurrent]
        states = 4 * self._page_bytes * max(map(len, self._pages))
        return num_sequences * states + 4 * num_tokens * max(widths, default=0) * torch.float32.itemsize

    def layer_bytes(self, layer_number: int) -> int:
        return len(self._pages[layer_number]) * self._page_bytes


@dataclass(frozen=True)
class _MixerRows:
    """The rows of one call of a mixer: those of B sequences with N new tokens each."""

    tokens: Tensor  # [B, N]: which of the T packed ones
    source: Tensor | None  # [B, pages]; None: there is no state before
    target: Tensor | None  # [B, pages]; None: none is kept


class StepStates:
    """The states of the step that runs now. Mixers ask it."""

    def __init__(self, layout: StateLayout):
        self.layout = layout
        self.forwards: list[StatefulForward] = []
        self.adapters = StepAdapters()  # of the linears in mixers
        self.kv: BlockMemory | None = None
        self.batches: Sequence[_MixerRows] = ()

    @contextmanager
    def of_step(self, sequences: Sequence[Sequence[StateSpan]], kv: BlockMemory) -> Iterator[None]:
        """The work inside is a step of these sequences, each of which consists of its spans."""
        self.kv, self.batches = kv, self._batches_of(sequences, kv)
        try:
            yield
        finally:
            self.kv, self.batches = None, ()

    def _batches_of(self, sequences: Sequence[Sequence[StateSpan]], kv: BlockMemory) -> list[_MixerRows]:
        """One call for all first spans of a length, then one for all second ones, and so on: a span may begin
        with the state that the one before it leaves."""
        alike: dict[tuple[int, int, bool, bool], list[tuple[int, StateSpan]]] = {}
        start = 0
        for spans in sequences:
            for place, span in enumerate(spans):
                kind = (place, span.num_tokens, bool(span.source), bool(span.target))
                alike.setdefault(kind, []).append((start, span))
                start += span.num_tokens
        return [self._rows(alike[kind], kv) for kind in sorted(alike)]

    def _rows(self, found: Sequence[tuple[int, StateSpan]], kv: BlockMemory) -> _MixerRows:
        """found: spans of one kind, and where each begins among the packed tokens."""
        spans = [span for _, span in found]
        tokens = torch.tensor([[first] for first, _ in found]) + torch.arange(spans[0].num_tokens)
        tokens = tokens.to(kv.buffer.device)
        source = self.layout.page_ids([s.source for s in spans], kv) if spans[0].source else None
        target = self.layout.page_ids([s.target for s in spans], kv) if spans[0].target else None
        return _MixerRows(tokens, source, target)


class MixerKernel(Protocol):
    """Computes what a mixer computes."""

    def __call__(self, rows: Tensor, states: Tensor) -> Tensor:
        """rows [B, N, hidden_size]: N new tokens of B sequences. states [B, bytes] uint8: of this layer, as
        `LayerStates.places` says; all 0 in front of a sequence's first token; they become those after the
        tokens. Returns the same as rows."""
        ...


class StatefulForward:
    """The forward of a mixer, for the sequences of a packed step. Outside of a step with states it passes the
    call on: the tokens are then those of one new sequence."""

    def __init__(self, mixer: nn.Module, step: StepStates, number: int):
        """number: of its layer among those with states. Raises ConfigError."""
        self.mixer = mixer
        self._forward, self._cache_argument = mixer.forward, cache_argument(mixer)
        self._step, self._number = step, number
        self.states = step.layout.layers[number]
        self._places = self.states.places
        self._num_states = 1 + max(tensor.number for tensor in self.states.tensors)
        self.kernel: MixerKernel | None = None  # None: the mixer's own code

    def __call__(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        """hidden_states [1, T, hidden_size] → the same."""
        keywords = {name: given for name, given in keywords.items() if name != "paged"}
        if self._step.kv is None:
            return self._forward(hidden_states, **keywords)
        out = torch.empty_like(hidden_states)
        for batch in self._step.batches:
            rows = hidden_states[0, batch.tokens]
            with self._step.adapters.of_tokens(batch.tokens, rows.shape[:-1]):
                out[0, batch.tokens] = self._run(rows, batch, self._step.kv, keywords)
        return out

    def _run(self, rows: Tensor, batch: _MixerRows, kv: BlockMemory, keywords: dict[str, Any]) -> Tensor:
        """rows [B, N, hidden_size] → the same."""
        layout, number = self._step.layout, self._number
        if batch.source is not None:
            stored = layout.load(number, batch.source, kv)
        else:
            stored = rows.new_zeros(len(rows), layout.layer_bytes(number), dtype=torch.uint8)
        if self.kernel is not None:
            out = self.kernel(rows, stored)
        else:
            out = self.run_module(rows, stored, is_first=batch.source is None, keywords=keywords)
        if batch.target is not None:
            layout.store(number, batch.target, stored, kv)
        return out

    def run_module(
        self,
        rows: Tensor,
        stored: Tensor,
        *,
        is_first: bool,
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """What a `MixerKernel` computes, by the mixer's own code. is_first: no token is in front of these."""
        states = LinearAttentionLayer(self._num_states)
        if not is_first:
            self._put(states, stored)
        # the mixer finds its layer by number
        cache = Cache(layers=[states] * (self.states.layer_idx + 1))
        out = self._forward(rows, **{**keywords, self._cache_argument: cache})
        self._take(states, stored)
        return out

    def _put(self, states: LinearAttentionLayer, stored: Tensor) -> None:
        states.device, states.dtype = stored.device, None
        for tensor, view in self._views(stored):
            if tensor.is_recurrent:
                states.recurrent_states[tensor.number] = view
                states.is_recurrent_states_initialized[tensor.number] = True
            else:
                states.conv_states[tensor.number] = view
                states.is_conv_states_initialized[tensor.number] = True
                states.conv_kernel_size[tensor.number] = view.shape[-1]
            states.has_previous_state[tensor.number] = True

    def _take(self, states: LinearAttentionLayer, stored: Tensor) -> None:
        for tensor, view in self._views(stored):
            kept = states.recurrent_states if tensor.is_recurrent else states.conv_states
            new = kept[tensor.number]
            if new is None or new.shape != view.shape or new.dtype != view.dtype:
                raise RuntimeError(
                    f"{self.states.module} keeps a state of another form than when it was loaded"
                )
            if new.data_ptr() != view.data_ptr():  # some mixers write to the state that they are given
                view.copy_(new)

    def _views(self, stored: Tensor) -> Iterator[tuple[StateTensor, Tensor]]:
        """stored [B, bytes] → [B, *shape] of each state."""
        for tensor, place in self._places:
            yield tensor, stored[:, place].view(tensor.dtype).unflatten(1, tensor.shape)


def cache_argument(mixer: nn.Module) -> str:
    """The name by which it takes the cache. Raises ConfigError."""
    names = inspect.signature(mixer.forward).parameters
    found = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    if found is None:
        raise ConfigError(f"{type(mixer).__name__} takes no cache of states by a known name")
    return found


def install(
    text_model: nn.Module, layers: Sequence[LayerStates], attention: Sequence[str], kv_layout: MemoryLayout
) -> StepStates:
    """Gives every mixer of the text model a `StatefulForward`. attention: names of the modules that call
    attention; block memory has their KV one after the other, so they are renumbered. Raises ConfigError."""
    for place, name in enumerate(attention):
        text_model.get_submodule(name).layer_idx = place
    step = StepStates(StateLayout(layers, kv_layout))
    for number, layer in enumerate(layers):
        mixer = text_model.get_submodule(layer.module)
        mixer.forward = StatefulForward(mixer, step, number)
        step.forwards.append(mixer.forward)
    return step
