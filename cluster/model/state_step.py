"""The states of one step, and the mixers that read and write them.

A `StatefulForward` stands in front of each mixer. What computes it is

* a kernel for all sequences of the step (`MixerKernel`), if there is one for it on this device;
* else the mixer's own code, over copies of the states: one call for all spans of one length, with the cache
  object that transformers knows.

A recorded step knows its spans by tensors alone (`SpanTensors`). Without kernels it can only be a step of
answers. Runs on the engine's thread. Owns no memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.cuda.mixer_chunks import MixerChunks
from cluster.model.cuda.uploads import upload
from cluster.model.states import LayerStates, PackedSpans, SpanTensors, StateLayout, StateSpan, StateTensor
from cluster.model.step_adapters import StepAdapters

# by which names a mixer takes the cache
_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value", "cache")


@dataclass(frozen=True)
class _MixerRows:
    """The rows of one call of a mixer: those of B sequences with as many new tokens each."""

    num_sequences: int  # B
    tokens: slice | Tensor  # of the T packed ones, sequence after sequence
    source: Tensor | None  # [B, pages]; None: there is no state before
    target: Tensor | None  # [B, pages]; None: none is kept


class _PlacedSpan(NamedTuple):
    token: int  # the first one, among the packed ones
    row: int  # among all spans
    span: StateSpan


class StepState:
    """The spans of one step, and where their states lie. What mixers ask for is made once, by the first that
    asks. Nothing waits for the device."""

    def __init__(
        self, layout: StateLayout, kv: BlockMemory, sequences: Sequence[Sequence[StateSpan]],
        recorded: SpanTensors | None = None, adapters: StepAdapters | None = None,
    ):  # fmt: skip
        """sequences: each consists of its spans. recorded: of a recorded step, in the place of these.
        adapters: of the linears in mixers."""
        self.layout, self.kv = layout, kv
        self.adapters = adapters or StepAdapters()
        self.sequences, self._recorded = sequences, recorded
        self.native_spans: object = None  # of native CPU kernels, which make it

    @property
    def tensors(self) -> SpanTensors:
        return self._sent[0] if self._recorded is None else self._recorded

    @cached_property
    def source_pages(self) -> Tensor:
        """[S, pages] int64; -1: there is no state before."""
        return self.layout.page_ids(self.tensors.source, self.kv)

    @cached_property
    def target_pages(self) -> Tensor:
        """[S, pages] int64; -1: none is kept."""
        return self.layout.page_ids(self.tensors.target, self.kv)

    @cached_property
    def chunks(self) -> MixerChunks:
        return MixerChunks.of(self.tensors)

    @cached_property
    def batches(self) -> Sequence[_MixerRows]:
        """One call for all first spans of a length, then one for all second ones, and so on: a span may begin
        with the state that the one before it leaves. Raises RuntimeError for a recorded step with prompts."""
        if self._recorded is not None:
            if not self._recorded.is_decode:
                raise RuntimeError("the states of prompts need a kernel for every mixer")
            count = len(self._recorded.spans)
            return [_MixerRows(count, slice(None), self.source_pages, self.target_pages)]
        return [
            self._rows(found, tokens, rows)
            for found, tokens, rows in zip(self._alike, self._sent[1][::2], self._sent[1][1::2], strict=True)
        ]

    def _rows(self, found: Sequence[_PlacedSpan], tokens: Tensor, rows: Tensor) -> _MixerRows:
        """tokens, rows: those of these spans, on the device."""
        first = found[0]
        source = self.source_pages[rows] if first.span.source else None
        target = self.target_pages[rows] if first.span.target else None
        if len(found) == 1:  # a long one is not gathered
            return _MixerRows(1, slice(first.token, first.token + first.span.num_tokens), source, target)
        return _MixerRows(len(found), tokens, source, target)

    @cached_property
    def _sent(self) -> tuple[SpanTensors, Sequence[Tensor]]:
        """On the device: the spans, and for each of `_alike` its tokens and its rows among the spans."""
        spans = PackedSpans.of(self.sequences, self.layout.num_blocks)
        groups: list[np.ndarray] = []
        for found in self._alike:
            firsts = np.array([each.token for each in found])
            groups.append((firsts[:, None] + np.arange(found[0].span.num_tokens)).ravel())
            groups.append(np.array([each.row for each in found]))
        sent = upload(
            [spans.starts, spans.firsts, spans.spans, spans.source, spans.target, *groups],
            self.kv.buffer.device,
        )
        is_decode = len(spans.spans) == len(spans.firsts) == len(self.sequences)
        return SpanTensors(*sent[:5], is_decode), [each.long() for each in sent[5:]]

    @cached_property
    def _alike(self) -> list[list[_PlacedSpan]]:
        """The spans that one call of a mixer may have: of one place in their sequences, one length, and with
        and without the same states."""
        found: dict[tuple[int, int, bool, bool], list[_PlacedSpan]] = {}
        token = row = 0
        for own in self.sequences:
            for place, span in enumerate(own):
                kind = (place, span.num_tokens, bool(span.source), bool(span.target))
                found.setdefault(kind, []).append(_PlacedSpan(token, row, span))
                token, row = token + span.num_tokens, row + 1
        return [found[kind] for kind in sorted(found)]


class StepStates:
    """The states of the step that runs now. Mixers ask it."""

    def __init__(self, layout: StateLayout):
        self.layout = layout
        self.forwards: list[StatefulForward] = []
        self.adapters = StepAdapters()  # of the linears in mixers
        self.now: StepState | None = None

    def keep_mixers_of(self, text_model: nn.Module) -> None:
        """Forgets mixers that are no longer in the model: a kernel of their layer has taken their place."""
        left = set(text_model.modules())
        self.forwards = [forward for forward in self.forwards if forward.mixer in left]

    @contextmanager
    def of_step(self, state: StepState) -> Iterator[None]:
        """The work inside is that step."""
        self.now = state
        try:
            yield
        finally:
            self.now = None


def in_step(
    states: StepStates | None, kv: BlockMemory, sequences: Sequence[Sequence[StateSpan]] = (),
    recorded: SpanTensors | None = None,
) -> AbstractContextManager[None]:  # fmt: skip
    """The work inside is that of these sequences, or of a recorded step; states None: of a model without."""
    if states is None:
        return nullcontext()
    return states.of_step(StepState(states.layout, kv, sequences, recorded, states.adapters))


class MixerKernel(Protocol):
    """Computes what a mixer computes."""

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        """rows [T, hidden_size]: the new tokens of the step. Reads the states before them and writes those
        after them. Returns the same as rows."""
        ...


@runtime_checkable
class SharesKernel(MixerKernel, Protocol):
    """One whose last product need not be summed."""

    def shares(self, rows: Tensor, step: StepState) -> Tensor:
        """As the call, but returns shares [S, T, hidden_size], whose sum it is."""
        ...


Compute = Callable[[Tensor, Tensor, bool], Tensor]


def over_copies(rows: Tensor, step: StepState, number: int, compute: Compute) -> Tensor:
    """Implements `MixerKernel` by calls over copies of the states. number: of the layer among those with
    states. compute(rows, states, is_first): rows [B, N, hidden_size] are N new tokens of B sequences; states
    [B, bytes] uint8 are as `LayerStates.places` says, 0 in front of a sequence's first token (`is_first`);
    they become those after the tokens. It returns the same as rows."""
    out, layout = torch.empty_like(rows), step.layout
    for batch in step.batches:
        if batch.source is not None:
            stored = layout.load(number, batch.source, step.kv)
        else:
            size = (batch.num_sequences, layout.layer_bytes(number))
            stored = rows.new_zeros(size, dtype=torch.uint8)
        mine = rows[batch.tokens].unflatten(0, (batch.num_sequences, -1))
        with step.adapters.of_tokens(batch.tokens, mine.shape[:-1]):
            out[batch.tokens] = compute(mine, stored, batch.source is None).flatten(0, 1)
        if batch.target is not None:
            layout.store(number, batch.target, stored, step.kv)
    return out


class StatefulForward:
    """The forward of a mixer, for the sequences of a packed step. Outside of a step with states it passes the
    call on: the tokens are then those of one new sequence."""

    def __init__(self, mixer: nn.Module, step: StepStates, number: int):
        """number: of its layer among those with states. Raises ConfigError."""
        self.mixer, self.number = mixer, number
        self._forward, self._cache_argument = mixer.forward, cache_argument(mixer)
        self._step = step
        self.layout = step.layout
        self.states: LayerStates = step.layout.layers[number]
        self._places = self.states.places
        self._num_states = 1 + max(tensor.number for tensor in self.states.tensors)
        self.kernel: MixerKernel | None = None  # None: the mixer's own code

    @property
    def now(self) -> StepState | None:
        """The step that runs now."""
        return self._step.now

    def __call__(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        """hidden_states [1, T, hidden_size] → the same."""
        keywords = {name: given for name, given in keywords.items() if name != "paged"}
        if self._step.now is None:
            return self._forward(hidden_states, **keywords)
        if self.kernel is not None:
            return self.kernel(hidden_states[0], self._step.now)[None]
        return self.run_module(hidden_states[0], self._step.now, keywords=keywords)[None]

    def shares(self, rows: Tensor) -> Tensor:
        """rows [T, hidden_size] → shares [S, T, hidden_size]: the call's result is their sum."""
        if self._step.now is not None and isinstance(self.kernel, SharesKernel):
            return self.kernel.shares(rows, self._step.now)
        return self(rows[None])

    def run_module(
        self, rows: Tensor, step: StepState, *, keywords: Mapping[str, Any] = MappingProxyType({})
    ) -> Tensor:
        """What a `MixerKernel` computes, by the mixer's own code."""

        def compute(rows: Tensor, stored: Tensor, is_first: bool) -> Tensor:
            states = LinearAttentionLayer(self._num_states)
            if not is_first:
                self._put(states, stored)
            # the mixer finds its layer by number
            cache = Cache(layers=[states] * (self.states.layer_idx + 1))
            out = self._forward(rows, **{**keywords, self._cache_argument: cache})
            self._take(states, stored)
            return out

        return over_copies(rows, step, self.number, compute)

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
