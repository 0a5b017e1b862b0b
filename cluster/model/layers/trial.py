"""A small packed step of random input over random contexts: what a layer and its replacements are run on.

The step holds an answer's token, a chunk and a whole prompt. Every run writes the K and V of the new tokens
to the same slots. A run computes on the device of the text model; only `seconds` and comparisons wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch
from cluster.model.collectives import Collectives
from cluster.model.kv_format import LayerCache, layer_cache
from cluster.model.layers.parts import dtype_of
from cluster.model.step_adapters import StepAdapters

_SIZES = ((20, 1), (3, 6), (0, 9))  # per sequence: tokens in the cache, new tokens
NUM_TOKENS = sum(new for _, new in _SIZES)
_SCALE = 0.1  # of the input, so that what a layer of small weights adds does not vanish behind it
_NUM_ROUNDS = 5
# Largest relative error (2-norm) of what replaces an encoder's block or its attention: at least three times
# the error seen on random weights.
ENCODER_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention, and its settings."""

    num_query: int
    num_kv: int
    key_width: int  # of a row of Q and K
    value_width: int
    attention: LayerAttention

    def to_json(self) -> dict[str, Any]:
        """Returns the fields without sinks."""
        return asdict(replace(self, attention=replace(self.attention, sinks=None)))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Heads:
        return cls(**{**fields, "attention": LayerAttention(**fields["attention"])})


@dataclass(frozen=True)
class Observed:
    """What one run of a layer has shown."""

    added: Tensor  # [1, NUM_TOKENS, hidden] float32: its output less its input
    heads: Heads | None  # of its one call of attention; None: it does not call it
    # cos and sin, in whatever form the text model gives them to its layers; None: it gives none
    rotary: object


class RandomStep:
    """A step over block memory whose layers are filled with random K and V. sizes: per sequence, tokens in
    the cache and new tokens."""

    def __init__(
        self, layout: MemoryLayout, sizes: Sequence[tuple[int, int]], device: torch.device,
        dtype: torch.dtype, generator: torch.Generator,
    ):  # fmt: skip
        size = layout.segments[0].rows
        lens = [context + new for context, new in sizes]
        self._query_lens, self._lens = [new for _, new in sizes], lens
        longest = -(-max(lens) // size)
        self.memory = BlockMemory(layout, len(sizes) * longest, device)
        tables = torch.arange(self.memory.num_blocks).view(len(sizes), longest)
        indices = [torch.arange(context, context + new) for context, new in sizes]
        slots = [table[own // size] * size + own % size for own, table in zip(indices, tables, strict=True)]
        self.slots, self._tables = torch.cat(slots).to(device), tables.to(device)
        every = torch.arange(self.memory.num_blocks * size)
        segments_a_layer = 4 if layout.segments[0].dtype == torch.int8 else 2
        for layer_idx in range(len(layout.segments) // segments_a_layer):
            cache = layer_cache(self.memory, layer_idx)
            key, value = (
                torch.randn(len(every), *store.row_shape, generator=generator).to(device, dtype)
                for store in (cache.key, cache.value)
            )
            cache.write(every.to(device), key, value)

    def batch(self) -> PagedBatch:
        """Returns the step with a memo of its own."""
        return PagedBatch(
            self.memory, self.memory.layout.segments[0].rows, self.slots, self._query_lens, self._lens,
            self._tables, torch.tensor(self._lens, device=self.slots.device), [()] * len(self._lens),
        )  # fmt: skip


class WholeDecoder(Protocol):
    """Rotary embedding, layers, last norm and head of a text model, without its own code in between."""

    @property
    def kernels_s(self) -> float | None:
        """How long each thread was in kernels in the last step, on average. None: not known."""
        ...

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        """embeds [1, T, hidden], contiguous: becomes what the last layer gives. positions in the model's
        form. wanted: [n] tokens. Returns [n, vocab_size] float32."""
        ...


class Trial:
    """Made before a layer of `text_model` is replaced. Its attention is `paged_attention`, over KV of
    `layout`. positions: [T] indices to position ids as the text model takes them."""

    def __init__(
        self, text_model: nn.Module, layout: MemoryLayout, attention: AttentionBackend,
        positions: Callable[[Tensor], Tensor], clock: Callable[[], float] = time.perf_counter,
        adapters: StepAdapters | None = None, collectives: Collectives | None = None,
    ):  # fmt: skip
        """adapters: where adapted modules ask for a step's; None: none is adapted. collectives: of a rank;
        all of them run the same layers, and learn the same."""
        self._collectives = collectives
        # a parameter that is known packed only is on the meta device
        self._device = next(own.device for own in text_model.parameters() if not own.is_meta)
        self._text_model, self._attention, self._clock = text_model, attention, clock
        generator, dtype = torch.Generator().manual_seed(0), dtype_of(text_model)
        self._step = RandomStep(layout, _SIZES, self._device, dtype, generator)
        x = torch.randn(1, NUM_TOKENS, cast(Any, text_model).config.hidden_size, generator=generator)
        self._x = (_SCALE * x).to(self._device, dtype)
        self._positions = positions(torch.arange(NUM_TOKENS, device=self._device))
        self._adapters = adapters or StepAdapters()
        num_adapters = self._adapters.num_slots
        # the first sequence has none, the others the first and the last adapter
        slots = torch.tensor([0, min(1, num_adapters), num_adapters], device=self._device)
        counts = torch.tensor([new for _, new in _SIZES], device=self._device)
        self._slots = slots.repeat_interleave(counts) if num_adapters else None

    def observe(self, layer: nn.Module) -> Observed | None:
        """None: the layer does not return one tensor, calls attention more than once, or is given more than
        rows and keywords."""
        if self._first_call[0] > 1:
            return None
        recorder = _AttentionRecorder(self._attention)
        added = self._added(layer, recorder)
        if not isinstance(added, Tensor) or len(recorder.calls) > 1:
            return None
        heads = recorder.calls[0] if recorder.calls else None
        return Observed(added, heads, self._first_call[1].get("position_embeddings"))

    def agrees(self, replacement: nn.Module, observed: Observed, tolerance: float) -> bool:
        """Whether it adds to its input what the observed layer adds, but for a relative error (2-norm).
        Raises what the replacement raises; on ranks, if it raises on one of them."""
        if self._collectives is not None:
            self._collectives.rehearse(lambda: self._added(replacement, self._attention))
        added = cast(Tensor, self._added(replacement, self._attention))
        return self.all_agree(agree(added, observed.added, tolerance))

    def all_agree(self, agrees: bool) -> bool:
        """Whether all ranks do."""
        return agrees if self._collectives is None else self._collectives.all_agree(agrees)

    def seconds(self, layer: nn.Module) -> float:
        """The median of some runs; on ranks, of the slowest."""
        own_s = median_s(lambda: self._added(layer, self._attention), self._device, _NUM_ROUNDS, self._clock)
        return own_s if self._collectives is None else self._collectives.largest(own_s)

    def agrees_whole(self, decoder: WholeDecoder, head: nn.Module, tolerance: float) -> bool:
        """Whether the decoder gives the logits of the text model and the head."""
        expected = head(self._run_text_model().last_hidden_state)[0].float()
        wanted = torch.arange(NUM_TOKENS, device=self._device)

        def run() -> Tensor:
            with self._adapters.of_step(self._slots):
                return decoder.logits(self._x.clone(), self._positions, self._step.batch(), wanted)

        if self._collectives is not None:
            self._collectives.rehearse(run)
        return self.all_agree(agree(run(), expected, tolerance))

    def _added(self, layer: nn.Module, attention: AttentionBackend) -> Tensor | None:
        keywords = {**self._first_call[1], "paged": (self._step.batch(), attention)}
        with self._adapters.of_step(self._slots):
            out = layer(self._x, **keywords)
        return out.float() - self._x.float() if isinstance(out, Tensor) else None

    def _run_text_model(self) -> Any:
        with self._adapters.of_step(self._slots):
            return self._text_model(
                inputs_embeds=self._x, position_ids=self._positions, use_cache=False,
                paged=(self._step.batch(), self._attention),
            )  # fmt: skip

    @cached_property
    def _first_call(self) -> tuple[int, Mapping[str, object]]:
        """How the text model calls its first layer: number of positional arguments, keywords."""
        num_positional, given = 0, {}

        def note(_layer: nn.Module, args: tuple, keywords: dict) -> None:
            nonlocal num_positional, given
            num_positional, given = len(args), keywords
            raise _ArgumentsKnown

        first = cast(nn.ModuleList, self._text_model.layers)[0]
        hook = first.register_forward_pre_hook(note, with_kwargs=True)
        try:
            self._run_text_model()
        except _ArgumentsKnown:
            pass
        finally:
            hook.remove()
        return num_positional, given


@dataclass
class _AttentionRecorder:
    """Records the calls of a layer."""

    backend: AttentionBackend
    calls: list[Heads] = field(default_factory=list)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        self.backend.write(batch, cache, key, value)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        (_, num_query, key_width), (_, num_kv, value_width) = query.shape, new_value.shape
        self.calls.append(Heads(num_query, num_kv, key_width, value_width, layer))
        return self.backend.attend(batch, layer, query, new_key, new_value, cache)


class _ArgumentsKnown(Exception):
    """Ends a forward after its arguments were recorded."""


def agree(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether they have one form, and the relative error (2-norm) is at most the tolerance; 0: all numbers
    are the same."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if tolerance == 0:
        return torch.equal(actual, expected)
    actual, expected = actual.float(), expected.float()
    return bool((actual - expected).norm() <= tolerance * expected.norm())


def median_s(
    work: Callable[[], object], device: torch.device, num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:  # fmt: skip
    """Seconds from a call to the end of what it has enqueued."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    times = []
    for _ in range(num_rounds):
        synchronize(device)
        start = clock()
        work()
        synchronize(device)
        times.append(clock() - start)
    return median(times)
