"""Decoder layers that run in one native call (`layer.cpp`): one of them, or all of a model with its last norm
and its head.

A layer's part of the call does norms, fused q/k/v, rotary embedding, writing of K and V, paged attention (or
a mixer that keeps states in its place), projection, gated MLP and both residuals. Its kernels and roundings
are those of `modules`, `attention_cpu` and `mixers`.

Runs on its caller's thread and on as many OpenMP threads as torch would use there. `layer_search` says which
layers and which models it can replace.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from cluster.errors import InternalError
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import AttentionBackend, PagedBatch
from cluster.model.attention_cpu import row_pointers, step_view
from cluster.model.cpu.adapters import NO_RUNS, AdapterRuns, attach_adapters, step_of
from cluster.model.cpu.library import Kernels, fields
from cluster.model.cpu.mixers import NativeMixer, SpanPages, native_mixer
from cluster.model.cpu.modules import NativeRmsNorm, PackedLinear, PackedWeights, pointer
from cluster.model.kv_format import layer_cache
from cluster.model.layers.parts import AttentionParts, DecoderParts, Linear, MlpParts, epsilon_of
from cluster.model.layers.trial import Heads
from cluster.model.state_step import StatefulForward


class _DecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer` of layer.cpp."""

    _fields_ = (
        *fields(c_void_p, "qkv out gate_up down input_norm post_norm query_norm key_norm mixer"),
        *fields(c_int64, "query_heads kv_heads head_width is_bf16 is_gated is_shifted"),
        *fields(c_double, "input_epsilon post_epsilon query_epsilon key_epsilon scale"),
    )


class _Decoder(ctypes.Structure):
    """Mirrors `Decoder` of layer.cpp."""

    _fields_ = (
        *fields(c_void_p, "layers views"), ("num_layers", c_int64), *fields(c_void_p, "norm head"),
        ("is_shifted", c_int64), ("epsilon", c_double),
    )  # fmt: skip


_OnLayer = ctypes.CFUNCTYPE(c_int, c_int64)
_SILENT = _OnLayer()


class _DecoderStep(ctypes.Structure):
    """Mirrors `DecoderStep` of layer.cpp."""

    _fields_ = (
        *fields(c_void_p, "slots cos sin rows views mixing x y wanted outputs logits"),
        *fields(c_int64, "tokens rotary_width num_views num_wanted threads"),
        ("on_layer", _OnLayer),
        *fields(c_void_p, "adapters adapted runs"),
        *fields(c_int64, "num_runs busy"),
    )


class NativeDecoderLayer(nn.Module):
    """hidden_states [1, T, hidden] → the same shape; writes K and V of the T tokens into the batch's slots.

    Holds a packed copy of all weights: the layer that it was made from can be deleted.
    """

    def __init__(
        self, parts: DecoderParts, heads: Heads | None, kernels: Kernels, *, int8: bool,
        shifted: bool,
    ):  # fmt: skip
        """parts: both halves are recognised. heads: of its attention; None: it has a mixer. shifted: form of
        the norms (`NativeRmsNorm`)."""
        super().__init__()
        mlp = cast(MlpParts, parts.mlp.inner)
        first = _attention(parts, heads) if heads is not None else _mixer(parts, kernels)
        gate, up = mlp.inputs
        weights = (
            PackedWeights(kernels, first.weight, bias=first.bias, int8=int8),
            PackedWeights(kernels, first.out.weight, bias=first.out.bias, int8=int8),
            PackedWeights(kernels, gate.weight, up=up.weight, int8=int8),
            PackedWeights(kernels, mlp.down.weight, int8=int8),
        )
        products = (first.linears, (first.out,), mlp.inputs, (mlp.down,))
        adapters = (
            attach_adapters(packed, kernels, linears, gated=linears is mlp.inputs)
            for packed, linears in zip(weights, products, strict=True)
        )
        self.adapters = nn.ModuleList(packed for packed in adapters if packed is not None)
        self.step_adapters = step_of([linear for linears in products for linear in linears])
        norms = [parts.attention.pre, parts.mlp.pre, *(first.head_norms or (None, None))]
        self.dtype = parts.dtype
        self.hidden_size = gate.in_features
        # None: its mixer has neither KV nor a window
        self.layer_idx = None if heads is None else parts.layer_idx
        self.window = None if heads is None else heads.attention.sliding_window
        self.states = None if first.mixer is None else cast(StatefulForward, parts.attention.body.forward)
        shape = (0, 0, 0) if heads is None else (heads.num_query, heads.num_kv, heads.key_width)
        # Layers can run in one call that have one form, and one shape of those of their kind.
        self.form = (self.dtype, self.hidden_size, up.out_features, int8, shifted)
        self.shape = (*shape, *(packed.layer.outputs for packed in weights[:1]), first.out.in_features)
        self._kept = (weights, [_weight(norm) for norm in norms], first.mixer)
        self._layer = _DecoderLayer(
            *(packed.address for packed in weights), *map(pointer, self._kept[1]),
            None if first.mixer is None else first.mixer.address,
            *shape, self.dtype == torch.bfloat16, first.is_gated, shifted,
            *(0.0 if norm is None else cast(float, epsilon_of(norm)) for norm in norms),
            0.0 if heads is None else heads.attention.scaling,
        )  # fmt: skip
        self.address = ctypes.addressof(self._layer)  # of a `DecoderLayer`; valid while this object lives
        self._alone = NativeDecoder([self], kernels)
        if hasattr(parts.layer, "attention_type"):  # some text models choose the mask by it
            self.attention_type = parts.layer.attention_type

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: tuple[PagedBatch, AttentionBackend],
        **_kwargs: object,
    ) -> Tensor:
        """Blocks. position_embeddings: cos and sin, [1, T, rotary width] of the model's dtype."""
        x = hidden_states.contiguous()
        y = torch.empty_like(x)
        self._alone.run(x, y, position_embeddings, paged[0])
        return y


@dataclass(frozen=True)
class _FirstHalf:
    """Attention or a mixer, as a native layer takes it."""

    linears: tuple[Linear, ...]  # of the input
    weight: Tensor  # of all of them
    bias: Tensor | None
    out: Linear
    head_norms: tuple[nn.Module, ...] = ()
    is_gated: bool = False
    mixer: NativeMixer | None = None


def _attention(parts: DecoderParts, heads: Heads) -> _FirstHalf:
    inner = cast(AttentionParts, parts.attention.inner)
    query, *others = inner.projections
    weights, biases = [linear.weight for linear in inner.projections], [query.bias]
    is_gated = is_gated_attention(inner, heads)
    if is_gated:  # a head's query, then its gate: all gates go behind the values
        own = query.weight.view(heads.num_query, 2, heads.key_width, -1).transpose(0, 1).flatten(1, 2)
        weights = [own[0], *(linear.weight for linear in others), own[1]]
    elif query.bias is not None:
        biases += [linear.bias for linear in others]
    return _FirstHalf(
        inner.projections, torch.cat(weights), None if biases[0] is None else torch.cat(biases), inner.out,
        inner.head_norms, is_gated,
    )  # fmt: skip


def is_gated_attention(inner: AttentionParts, heads: Heads) -> bool:
    """Whether the projection of the query has a gate for each of its outputs, head by head."""
    return inner.projections[0].out_features == 2 * heads.num_query * heads.key_width


def _mixer(parts: DecoderParts, kernels: Kernels) -> _FirstHalf:
    mixer = native_mixer(cast(StatefulForward, parts.attention.body.forward), kernels, kernels.weights)
    if mixer is None:
        raise InternalError("a native layer needs a mixer that the kernels know")
    weight = torch.cat([linear.weight for linear in mixer.linears])
    return _FirstHalf(mixer.linears, weight, None, mixer.out, mixer=mixer)


@dataclass(frozen=True)
class Head:
    """What follows the last layer."""

    norm: NativeRmsNorm
    linear: PackedLinear


class NativeDecoder:
    """Successive native layers of one form, and perhaps the model's last norm and head, in one call."""

    def __init__(self, layers: Sequence[NativeDecoderLayer], kernels: Kernels, head: Head | None = None):
        windows = list(dict.fromkeys(layer.window for layer in layers if layer.states is None))
        first = layers[0]
        self._states = next((layer.states for layer in layers if layer.states is not None), None)
        self._form, self._windows, self._head = first.form, windows, head
        self._layer_ids = [layer.layer_idx for layer in layers]
        self._adapters = next((layer.step_adapters for layer in layers if layer.step_adapters), None)
        norm = None if head is None else _weight(head.norm)
        addresses = (c_void_p * len(layers))(*(layer.address for layer in layers))
        views = (c_int64 * len(layers))(
            *(0 if layer.states is not None else windows.index(layer.window) for layer in layers)
        )
        self._decoder = _Decoder(
            ctypes.addressof(addresses), ctypes.addressof(views), len(layers),
            pointer(norm), None if head is None else head.linear.forward.address,
            head is not None and head.norm.is_shifted,
            0.0 if head is None else cast(float, epsilon_of(head.norm)),
        )  # fmt: skip
        self._kept = (addresses, views, norm)
        self._address = ctypes.addressof(self._decoder)
        self.kernels_s = 0.0  # of the last call: how long its threads were in kernels, on average
        self._rows: tuple[weakref.ref[BlockMemory], ctypes.Array[c_void_p]] | None = None
        self._run: Callable[..., None] = kernels.cdll.run_decoder

    def run(
        self, x: Tensor, y: Tensor, position_embeddings: tuple[Tensor, Tensor], batch: PagedBatch,
        wanted: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """x and y: contiguous [1, T, hidden]; y becomes what the last layer gives and may be x. Writes K and
        V of the T tokens into the batch's slots. wanted: [n] int64, the tokens of which the head makes
        float32 logits [n, vocab_size]. Blocks. An error of `batch.on_layer` ends the call there."""
        cos, sin = (each.contiguous() for each in position_embeddings)
        self._check(x, cos, sin, len(batch.slots))
        views = [step_view(batch, window).address for window in self._windows]
        view_addresses = (c_void_p * len(views))(*views)
        slots = batch.slots.contiguous()
        outputs = logits = None
        num_wanted = 0 if wanted is None else len(wanted)
        if num_wanted and self._head is not None:
            logits = torch.empty(num_wanted, self._head.linear.out_features)
            outputs = logits if x.dtype is torch.float32 else torch.empty_like(logits, dtype=x.dtype)
        on_layer, errors = self._listener(batch)
        adapted = None if self._adapters is None else self._adapters.slots
        runs = NO_RUNS if adapted is None else AdapterRuns.of(adapted)
        spans = None if self._states is None else SpanPages.of(self._states.now, len(slots))
        step = _DecoderStep(
            slots.data_ptr(), cos.data_ptr(), sin.data_ptr(), self._rows_of(batch.kv),
            ctypes.addressof(view_addresses), None if spans is None else spans.address,
            x.data_ptr(), y.data_ptr(),
            pointer(wanted), pointer(outputs), None if outputs is logits else pointer(logits),
            len(slots), cos.shape[-1], len(views), num_wanted, torch.get_num_threads(), on_layer,
            *runs.arguments,
        )  # fmt: skip
        self._run(self._address, ctypes.addressof(step))
        self.kernels_s = step.busy / 1e9
        if errors:
            raise errors[0]
        return logits

    def _check(self, x: Tensor, cos: Tensor, sin: Tensor, num_tokens: int) -> None:
        dtype, hidden_size, *_ = self._form
        if x.dtype is not dtype or x.shape != (1, num_tokens, hidden_size):
            raise InternalError(
                f"native layers need [1, {num_tokens}, {hidden_size}] {dtype}, not {x.shape} {x.dtype}"
            )
        if not can_rotate(cos, sin, num_tokens, dtype):
            raise InternalError(f"native layers cannot use a rotary embedding of {cos.shape}, {cos.dtype}")

    def _rows_of(self, kv: BlockMemory) -> int:
        """Address of `LayerRows` of every layer in this memory."""
        if self._rows is None or self._rows[0]() is not kv:
            caches = [None if idx is None else layer_cache(kv, idx) for idx in self._layer_ids]
            pointers = [
                pointer
                for cache in caches
                for store in ((cache.key, cache.value) if cache is not None else (None, None))
                for pointer in (row_pointers(store) if store is not None else (None, None))
            ]
            self._rows = (weakref.ref(kv), (c_void_p * len(pointers))(*pointers))
        return ctypes.addressof(self._rows[1])

    def _listener(self, batch: PagedBatch) -> tuple[ctypes._FuncPointer, list[BaseException]]:
        """What the call does after each layer, and where it leaves an error, which ends the call."""
        on_layer, errors = batch.on_layer, []
        if on_layer is None:
            return _SILENT, errors

        def announce(layer: int) -> int:
            try:
                on_layer(cast(int, self._layer_ids[layer]))
            except BaseException as error:  # C++ cannot pass it on: `run` raises it
                errors.append(error)
            return len(errors)

        return _OnLayer(announce), errors


@dataclass(frozen=True)
class NativeTextModel:
    """Implements `WholeDecoder`."""

    rotary: nn.Module
    layers: NativeDecoder
    vocab_size: int

    @property
    def kernels_s(self) -> float | None:
        return self.layers.kernels_s

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        """Blocks."""
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


def can_rotate(cos: Tensor, sin: Tensor, num_tokens: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support rotary embeddings of this form."""
    return (
        cos.shape == sin.shape
        and cos.shape[:-1] == (1, num_tokens)
        and cos.shape[-1] % 2 == 0
        and cos.dtype is dtype
        and sin.dtype is dtype
    )


def _weight(norm: object) -> Tensor | None:
    return None if norm is None else cast(Tensor, cast(nn.Module, norm).weight).detach().contiguous()
