"""Finds the decoder layers of a text model that one native call can run, and replaces them; and finds out
whether one call can run all of the model.

A layer is recognised by the names and types of its children. One run of the layer itself, over a small packed
step of random input and random contexts, records the settings of its attention. The replacement runs the same
step. It takes the layer's place only if it adds the same to the input. A layer that differs, or is not
recognised, stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch
from cluster.model.attention_cpu import MAX_GROUP, MAX_WIDTH, CpuAttention
from cluster.model.cpu.layer import Head, Heads, NativeDecoder, NativeDecoderLayer, can_rotate
from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import (
    NativeRmsNorm,
    PackedLinear,
    WeightDtype,
    dtype_of,
    is_gated_mlp,
    is_linear,
    is_rms_norm,
    is_servable,
)
from cluster.model.cpu.weight_source import Settings
from cluster.model.kv_format import LayerCache, layer_cache

logger = logging.getLogger(__name__)

# Largest relative error (2-norm) of what a replacement adds to its input: at least three times the error seen
# on random weights.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_INT8_TOLERANCE = 1e-1
_TRIAL_SIZES = ((20, 1), (3, 6), (0, 9))  # per sequence: tokens in the cache, new tokens
NUM_TRIAL_TOKENS = sum(new for _, new in _TRIAL_SIZES)
_TRIAL_SCALE = 0.1  # of the input, so that what a layer of small weights adds does not vanish behind it
_CHILDREN = frozenset(("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
_PROJECTIONS = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_HEAD_NORMS = frozenset(("q_norm", "k_norm"))


def optimise_layers(
    text_model: nn.Module, layout: MemoryLayout, backend: AttentionBackend, positions: Tensor,
    weight_dtype: WeightDtype = "auto", kernels: Kernels | None = None,
) -> int:  # fmt: skip
    """Replaces decoder layers of `text_model` in place; returns how many. If this machine has no kernels,
    does nothing.

    The model's attention is `paged_attention`; `layout` is that of its KV. positions: position ids of any
    `NUM_TRIAL_TOKENS` tokens, in the model's form. Call it before `modules.optimise`. Blocks: some seconds
    for a gigabyte of weights.
    """
    kernels = kernels or load()
    if kernels is None or not isinstance(backend, CpuAttention):
        return 0
    candidates = [
        (parent, name)
        for parent in text_model.modules()
        for name, child in parent.named_children()
        if _is_decoder_layer(child)
    ]
    if not candidates:
        return 0
    count = 0
    with torch.inference_mode():
        first = getattr(*candidates[0])
        trial = _Trial(text_model, first, _width(first), layout, backend, positions)
        for parent, name in candidates if trial.can_rotate else ():
            replacement = _replacement(cast(nn.Module, getattr(parent, name)), trial, kernels, weight_dtype)
            if replacement is not None:
                setattr(parent, name, replacement)
                count += 1
    logger.info("native CPU kernels (%s): %d decoder layers replaced", kernels.variant, count)
    return count


@dataclass(frozen=True)
class WholeDecoder:
    """Rotary embedding, layers, last norm and head of a text model, without its own code in between."""

    rotary: nn.Module
    layers: NativeDecoder
    vocab_size: int

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        """embeds [1, T, hidden], contiguous: becomes what the last layer gives. positions in the model's
        form. wanted: [n] tokens. Returns [n, vocab_size] float32. Blocks."""
        logits = self.layers.run(embeds, embeds, self._rotate(embeds, positions), batch, wanted)
        return embeds.new_empty(0, self.vocab_size, dtype=torch.float32) if logits is None else logits

    def _rotate(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """On one thread: a step's cosines take less time than another thread takes to wake up."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.rotary(embeds, positions)
        finally:
            torch.set_num_threads(num_threads)


def whole_decoder(
    text_model: nn.Module, head: nn.Module, layout: MemoryLayout, backend: AttentionBackend,
    positions: Tensor, kernels: Kernels | None = None,
) -> WholeDecoder | None:  # fmt: skip
    """A decoder that computes, bit by bit, what `text_model` and `head` compute one after the other, or None.

    Call it after `optimise_layers` and `modules.optimise`; the arguments are theirs. It shares the weights of
    the replaced layers. It has no place for what a model adds between two layers (deep-stack features):
    such a step needs the model's own forward.
    """
    kernels = kernels or load()
    layers, rotary, norm = (getattr(text_model, name, None) for name in ("layers", "rotary_emb", "norm"))
    if kernels is None or not isinstance(backend, CpuAttention) or not isinstance(rotary, nn.Module):
        return None
    if not (isinstance(layers, nn.ModuleList) and len(layers) and isinstance(norm, NativeRmsNorm)):
        return None
    native = [layer for layer in layers if isinstance(layer, NativeDecoderLayer)]
    if (
        len(native) < len(layers)
        or len({layer.form for layer in native}) > 1
        or not isinstance(head, PackedLinear)
    ):
        return None
    with torch.inference_mode():
        trial = _Trial(text_model, native[0], native[0].hidden_size, layout, backend, positions)
        decoder = WholeDecoder(rotary, NativeDecoder(native, kernels, Head(norm, head)), head.out_features)
        return decoder if trial.agrees(decoder, head) else None


@dataclass
class _AttentionRecorder:
    """The attention backend of a trial: records the calls of a layer."""

    backend: AttentionBackend
    heads: list[Heads | None] = field(default_factory=list)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        self.backend.write(batch, cache, key, value)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        (_, num_query, width), num_kv = query.shape, new_key.shape[1]
        is_plain = new_key.shape == new_value.shape and layer.softcap is None and layer.sinks is None
        is_known = is_plain and width <= MAX_WIDTH and num_query // num_kv <= MAX_GROUP
        self.heads.append(Heads(num_query, num_kv, width, layer) if is_known else None)
        return self.backend.attend(batch, layer, query, new_key, new_value, cache)


class _ArgumentsKnown(Exception):
    """Ends a forward after its arguments were recorded."""


class _Trial:
    """A packed step of random input over random contexts, the same for all layers. layer: the first of them;
    width: of its input."""

    def __init__(
        self, text_model: nn.Module, layer: nn.Module, width: int, layout: MemoryLayout,
        backend: CpuAttention, positions: Tensor,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        dtype = dtype_of(text_model)
        self._backend = backend
        self._block_size = layout.segments[0].rows
        self._memory, self._tables = _random_contexts(layout, dtype, generator)
        self._text_model, self._positions = text_model, positions
        x = torch.randn(1, NUM_TRIAL_TOKENS, width, generator=generator)
        self._x = (_TRIAL_SCALE * x).to(dtype)
        self._position_embeddings = self._keywords_of(layer, text_model, positions).get("position_embeddings")

    def _keywords_of(self, layer: nn.Module, text_model: nn.Module, positions: Tensor) -> dict:
        """The keyword arguments with which the text model calls its layer."""
        given: dict = {}

        def note(_layer: nn.Module, _args: tuple, keywords: dict) -> None:
            given.update(keywords)
            raise _ArgumentsKnown

        hook = layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            text_model(
                inputs_embeds=self._x, position_ids=positions, use_cache=False,
                paged=(self._batch(), self._backend)
            )  # fmt: skip
        except _ArgumentsKnown:
            pass
        finally:
            hook.remove()
        return given

    def _batch(self) -> PagedBatch:
        slots = []
        for (context, new), table in zip(_TRIAL_SIZES, self._tables, strict=True):
            indices = torch.arange(context, context + new)
            slots.append(table[indices // self._block_size] * self._block_size + indices % self._block_size)
        lens = [sum(size) for size in _TRIAL_SIZES]
        return PagedBatch(
            self._memory,
            self._block_size,
            slots=torch.cat(slots),
            query_lens=[new for _, new in _TRIAL_SIZES],
            context_lens=lens,
            block_tables=self._tables,
            context_lens_tensor=torch.tensor(lens),
            bidirectional_spans=[[] for _ in _TRIAL_SIZES],
        )

    @property
    def can_rotate(self) -> bool:
        given = self._position_embeddings
        return (
            isinstance(given, tuple)
            and len(given) == 2
            and can_rotate(*given, NUM_TRIAL_TOKENS, self._x.dtype)
        )

    def run(self, layer: nn.Module) -> tuple[object, list[Heads | None]]:
        """What the layer adds to its input, if it returns one tensor; and the settings of its calls of
        attention, None: not supported."""
        recorder = _AttentionRecorder(self._backend)
        out = layer(
            self._x, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=self._position_embeddings, paged=(self._batch(), recorder),
        )  # fmt: skip
        return out.float() - self._x.float() if isinstance(out, Tensor) else out, recorder.heads

    def agrees(self, decoder: WholeDecoder, head: nn.Module) -> bool:
        """Whether the decoder gives the logits of the whole text model and the head."""
        if not self.can_rotate:
            return False
        hidden = self._text_model(
            inputs_embeds=self._x, position_ids=self._positions, use_cache=False,
            paged=(self._batch(), self._backend),
        ).last_hidden_state  # fmt: skip
        wanted = torch.arange(NUM_TRIAL_TOKENS)
        logits = decoder.logits(self._x.clone(), self._positions, self._batch(), wanted)
        return torch.equal(logits, head(hidden)[0].float())


def _random_contexts(
    layout: MemoryLayout, dtype: torch.dtype, generator: torch.Generator
) -> tuple[BlockMemory, Tensor]:
    """K and V of the trial's sequences in all layers, and the block tables."""
    block_size = layout.segments[0].rows
    longest = -(-max(map(sum, _TRIAL_SIZES)) // block_size)
    memory = BlockMemory(layout, len(_TRIAL_SIZES) * longest)
    slots = torch.arange(memory.num_blocks * block_size)
    segments_a_layer = 4 if layout.segments[0].dtype == torch.int8 else 2
    for layer_idx in range(len(layout.segments) // segments_a_layer):
        cache = layer_cache(memory, layer_idx)
        key, value = (
            torch.randn(len(slots), *store.row_shape, generator=generator).to(dtype)
            for store in (cache.key, cache.value)
        )
        cache.write(slots, key, value)
    return memory, torch.arange(memory.num_blocks).view(len(_TRIAL_SIZES), longest)


def _replacement(
    layer: nn.Module, trial: _Trial, kernels: Kernels, weight_dtype: WeightDtype
) -> NativeDecoderLayer | None:
    """The fastest replacement that agrees with `layer`; None: there is none."""
    expected: list[Tensor] = []

    def candidates() -> Iterator[Settings]:
        added, asked = trial.run(layer)
        if not isinstance(added, Tensor) or len(asked) != 1 or (heads := asked[0]) is None:
            return
        if _fits(layer, heads):
            expected.append(added)
            for int8 in (True, False) if weight_dtype == "int8" else (False,):
                yield {"int8": int8, "heads": heads.to_json()}

    def build(settings: Settings) -> NativeDecoderLayer:
        return NativeDecoderLayer(layer, Heads.from_json(settings["heads"]), kernels, int8=settings["int8"])

    def agrees(candidate: NativeDecoderLayer, settings: Settings) -> bool:
        actual, _ = trial.run(candidate)
        tolerance = _INT8_TOLERANCE if settings["int8"] else _TOLERANCE[dtype_of(layer)]
        return bool((cast(Tensor, actual) - expected[0]).norm() <= tolerance * expected[0].norm())

    return kernels.weights.replacement(layer, candidates(), build, agrees)


def _is_decoder_layer(module: nn.Module) -> bool:
    """By the names and types of all parts; the comparison finds out whether it computes the same."""
    children = dict(module.named_children())
    if children.keys() != _CHILDREN or not is_servable(module):
        return False
    attention = dict(children["self_attn"].named_children())
    norms = [children["input_layernorm"], children["post_attention_layernorm"]]
    norms += [attention[name] for name in _HEAD_NORMS & attention.keys()]
    return (
        attention.keys() - _HEAD_NORMS == _PROJECTIONS
        and all(is_linear(attention[name]) for name in _PROJECTIONS)
        and all(is_rms_norm(norm) for norm in norms)
        and is_gated_mlp(children["mlp"])
    )


def _fits(layer: nn.Module, heads: Heads) -> bool:
    """Whether all parts have the sizes that the kernels need. Rows have an even length, because bfloat16 is
    read in pairs."""
    attention = cast(nn.Module, layer.self_attn)
    query, key, value = (cast(nn.Linear, getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
    head_norms = [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]
    down = cast(nn.Linear, cast(nn.Module, layer.mlp).down_proj)
    return (
        query.out_features == heads.num_query * heads.width
        and key.out_features == value.out_features == heads.num_kv * heads.width
        and len({linear.bias is None for linear in (query, key, value)}) == 1
        and all(norm.weight.numel() == heads.width for norm in head_norms)
        and all(width % 2 == 0 for width in (query.in_features, query.out_features, down.in_features))
    )


def _width(layer: nn.Module) -> int:
    return cast(nn.Linear, cast(nn.Module, layer.self_attn).q_proj).in_features
