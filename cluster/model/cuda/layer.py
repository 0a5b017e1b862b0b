"""Decoder layers by our Triton kernels and products, cuBLAS's where there are many tokens: the kernels of a
GPU, as the search in `cluster.model.layers` knows them. A layer that is fused whole is ten launches
(`layer_calls` lists them), or ten with a mixer of `mixers` in the place of attention; of another layer the
half that is recognised is fused, and the other runs by its modules.

A layer's last product is added by the launch that norms for the next one, so layers pass on a residual, which
they change in place, and what is still to be added to it (`Addition`). Runs on the engine's thread; enqueues
on the current stream and reads nothing on the host, so that a step may be recorded.

Letters: T tokens, N hidden width, W width of a rotary table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch
from cluster.model.attention_cuda import CudaAttention
from cluster.model.collectives import Collectives
from cluster.model.cuda.forms import norm_of
from cluster.model.cuda.layer_calls import (
    GateActivation,
    Norm,
    Rope,
    Rotation,
    Table,
    add,
    add_norm,
    gate,
    gate_heads,
    rope_write,
)
from cluster.model.cuda.layer_forms import Around, Product, activation, around, is_mixer, product_of, ropes
from cluster.model.cuda.mixers import kernel_of
from cluster.model.cuda.product_choice import TrialProduct, measure
from cluster.model.cuda.products import ProductChoice, product
from cluster.model.half_files import own_share
from cluster.model.kv_format import layer_cache
from cluster.model.layers.parts import (
    AttentionParts,
    DecoderParts,
    LayerHalf,
    Linear,
    MlpParts,
    is_linear,
    is_rms_norm,
)
from cluster.model.layers.search import Compared, Replacement, Settings, TextParts
from cluster.model.layers.trial import Heads, Observed
from cluster.model.rank_linears import GatheredLinear
from cluster.model.state_step import MixerKernel, StatefulForward

logger = logging.getLogger(__name__)

# Largest relative error (2-norm) of what a replacement adds to its input. Another form of a norm or a
# rotation is off by a tenth and more. INT8 codes may differ by one where a product rounds otherwise.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# Of mixers. Products round otherwise than torch's where the model's dtype has 16 bits.
_MIXER_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Rotary = tuple[Tensor, Tensor] | None  # cos and sin, [1, T, W]


@dataclass(frozen=True)
class Addition:
    """What must still be added to the residual: scale * post(the sum of `shares`)."""

    shares: Tensor  # [S, T, N]
    post: Norm | None
    scale: float | None  # None: 1

    def add_to(self, residual: Tensor) -> None:
        add(residual, self.shares, post=self.post, scale=self.scale)


def normed(residual: Tensor, pending: Addition | None, pre: Norm | None) -> Tensor:
    """Adds what is pending to the residual [T, N], in place. Returns pre(residual); without `pre` the
    residual."""
    if pre is None:
        if pending is not None:
            pending.add_to(residual)
        return residual
    if pending is None:
        return add_norm(residual, None, pre)
    return add_norm(residual, pending.shares, pre, post=pending.post, scale=pending.scale)


class FusedAttention:
    """The attention half of a layer."""

    def __init__(
        self, around: Around, qkv: Product, out: Product, rope: Rope, num_heads: int, layer: LayerAttention,
        layer_idx: int, attention: CudaAttention,
    ):  # fmt: skip
        self._around, self._qkv, self._out, self._rope = around, qkv, out, rope
        self._num_heads, self._layer, self._layer_idx = num_heads, layer, layer_idx
        self._attention = attention
        self.products = (qkv, out)

    def __call__(self, x: Tensor, pending: Addition | None, rotary: Rotary, batch: PagedBatch) -> Addition:
        """x [T, N], changed by what is pending alone."""
        cache = layer_cache(batch.kv, self._layer_idx)
        qkv = self._qkv(normed(x, pending, self._around.pre))
        cos, sin = (None, None) if rotary is None else (table[0] for table in rotary)
        query = x.new_empty(len(x), self._num_heads, cache.key.row_shape[1])
        rope_write(qkv, cos, sin, batch.slots, cache, self._num_heads, self._rope, query)
        if batch.on_layer is not None:
            batch.on_layer(self._layer_idx)
        mixed = self._attention.attend_blocks(batch, self._layer, query, cache)
        if self._rope.is_gated:
            mixed = gate_heads(qkv, mixed)
        return Addition(self._out(mixed.flatten(1)), self._around.post, self._around.scale)


class FusedMixer:
    """The first half of a layer whose mixer keeps states: it computes itself what lies between the norms."""

    products = ()

    def __init__(self, around: Around, mixer: nn.Module):
        self._around, self.mixer = around, mixer

    def __call__(self, x: Tensor, pending: Addition | None) -> Addition:
        """x [T, N], changed by what is pending alone."""
        forward = cast(StatefulForward, self.mixer.forward)
        shares = forward.shares(normed(x, pending, self._around.pre))
        return Addition(shares, self._around.post, self._around.scale)


class FusedMlp:
    """The MLP half of a layer."""

    def __init__(self, around: Around, gate_up: Product, down: Product, activation: GateActivation):
        self._around, self._gate_up, self._down, self._activation = around, gate_up, down, activation
        self.products = (gate_up, down)

    def __call__(self, x: Tensor, pending: Addition | None) -> Addition:
        """x [T, N], changed by what is pending alone."""
        gated = gate(self._gate_up(normed(x, pending, self._around.pre)), self._activation, x.dtype)
        return Addition(self._down(gated), self._around.post, self._around.scale)


class FusedLayer(nn.Module):
    """A decoder layer of which one half at least is fused."""

    def __init__(
        self, attention: FusedAttention | FusedMixer | LayerHalf[AttentionParts],
        mlp: FusedMlp | LayerHalf[MlpParts], parts: DecoderParts, collectives: Collectives | None = None,
    ):  # fmt: skip
        super().__init__()
        self._attention, self._mlp, self._collectives = attention, mlp, collectives
        self.parts = nn.ModuleList([*_modules_of(attention), *_modules_of(mlp)])  # adapters look for theirs
        if hasattr(parts.layer, "attention_type"):  # some text models choose the mask by it
            self.attention_type = parts.layer.attention_type
        # by which some rotary embeddings choose their table
        self.layer_type: str | None = getattr(parts.attention.body, "layer_type", None)

    @property
    def products(self) -> list[Product]:
        """Those of the halves that are fused."""
        halves = (half for half in (self._attention, self._mlp) if not isinstance(half, LayerHalf))
        return [each for half in halves for each in half.products]

    @property
    def has_fused_attention(self) -> bool:
        """Or a mixer in its place."""
        return isinstance(self._attention, FusedAttention | FusedMixer)

    @property
    def has_fused_mlp(self) -> bool:
        return isinstance(self._mlp, FusedMlp)

    def forward(
        self, hidden_states: Tensor, *, paged: tuple[PagedBatch, AttentionBackend],
        position_embeddings: Rotary = None, **keywords: object,
    ) -> Tensor:  # fmt: skip
        """hidden_states [1, T, N] → the same shape."""
        x = hidden_states[0].clone(memory_format=torch.contiguous_format)
        pending = self.run(x, None, position_embeddings, paged, keywords)
        if pending is not None:
            pending.add_to(x)
        return x[None]

    def run(
        self, x: Tensor, pending: Addition | None, rotary: Rotary,
        paged: tuple[PagedBatch, AttentionBackend | None], keywords: Mapping[str, object],
    ) -> Addition | None:  # fmt: skip
        """x [T, N] becomes the layer's output, but for what is returned. The backend and `keywords` are
        arguments of a module of attention. In a rehearsal only what is fused runs: modules of a rank may have
        collectives of their own."""
        only_fused = self._collectives is not None and self._collectives.is_rehearsing
        if isinstance(self._attention, FusedAttention):
            pending = self._attention(x, pending, rotary, paged[0])
        elif only_fused:
            pass
        elif isinstance(self._attention, FusedMixer):
            pending = self._attention(x, pending)
        else:
            more = {**keywords, "position_embeddings": rotary, "paged": paged}
            pending = _by_modules(self._attention, x, pending, more)
        if isinstance(self._mlp, FusedMlp):
            return self._mlp(x, pending)
        if only_fused:
            return pending
        return _by_modules(self._mlp, x, pending, {})


def _modules_of(half: FusedAttention | FusedMixer | FusedMlp | LayerHalf) -> list[nn.Module]:
    if isinstance(half, LayerHalf):
        return [half.body]
    if isinstance(half, FusedMixer):
        return [half.mixer]
    return [product.updates for product in half.products if product.updates is not None]


def _by_modules(half: LayerHalf, x: Tensor, pending: Addition | None, keywords: Mapping[str, object]) -> None:
    if pending is not None:
        pending.add_to(x)
    x.copy_(half.run_modules(x[None], **keywords)[0])


class FusedTextModel:
    """Implements `WholeDecoder`: fused layers one after the other."""

    kernels_s = None

    def __init__(
        self, rotary: nn.Module, layers: Sequence[FusedLayer], norm: Norm, head: nn.Linear,
        choice: ProductChoice,
    ):  # fmt: skip
        self._rotary, self._layers, self._norm, self._head = rotary, layers, norm, head
        self._choice = choice
        has_types = hasattr(rotary, "layer_types")  # then it gives a table for each
        self._types = [layer.layer_type if has_types else None for layer in layers]

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        x, pending = embeds[0], None
        tables = {
            kind: self._rotary(embeds, positions, *(() if kind is None else (kind,)))
            for kind in dict.fromkeys(self._types)
        }
        for layer, kind in zip(self._layers, self._types, strict=True):
            pending = layer.run(x, pending, tables[kind], (batch, None), {})
        hidden = normed(x, pending, self._norm)
        if not (batch.is_decode and len(wanted) == len(x)):
            hidden = hidden[wanted]
        logits = product(hidden, self._head.weight, self._head.bias, self._choice, is_whole=True)[0]
        if isinstance(self._head, GatheredLinear):
            logits = self._head.collectives.gather(logits, self._head.out_features)
        return logits.float()


class Tried(Compared):
    """A candidate that fails is none: a kernel that does not compile for this device must not keep a model
    from being served."""

    def replacement(
        self, module: nn.Module, candidates: Iterable[Settings], build: Callable[[Settings], Replacement],
        agrees: Callable[[Replacement, Settings], bool],
    ) -> Replacement | None:  # fmt: skip
        def succeeds(candidate: Replacement, settings: Settings) -> bool:
            try:
                return agrees(candidate, settings)
            except Exception as error:  # compilers raise what they like; a device that broke raises it again
                logger.warning("Triton kernels: %s fails: %s", settings, error)
                return False

        return super().replacement(module, candidates, build, succeeds)


class CudaLayerKernels:
    """Implements `LayerKernels`."""

    name = "Triton kernels"
    mixer_tolerances: Mapping[torch.dtype, float] = _MIXER_TOLERANCES

    def __init__(
        self, dtype: torch.dtype, attention: CudaAttention, *, is_timed: bool = True,
        collectives: Collectives | None = None,
    ):  # fmt: skip
        """collectives: of a rank."""
        self.source = Tried()
        self._collectives = collectives
        self.is_timed = is_timed
        self.whole_tolerance = _TOLERANCE[dtype]
        self._attend, self._choice = attention, ProductChoice()

    def can_replace(self, parts: DecoderParts) -> bool:
        attention, mlp = parts.attention.inner, parts.mlp.inner
        is_fused = (attention and product_of(attention.projections), mlp and product_of(mlp.inputs))
        return parts.dtype in _TOLERANCE and any(is_fused)

    def candidates(self, parts: DecoderParts, observed: Observed) -> Iterator[Settings]:
        """Norms and activation are recognised by what they compute (`forms`). Each rotation is tried."""
        has_mlp = activation(parts) is not None
        if observed.heads is None:
            if has_mlp and is_mixer(parts):
                yield {"mixer": True, "mlp": True}
            return
        for rope in ropes(parts, observed):
            settings = {"heads": observed.heads.to_json(), **rope}
            if has_mlp:
                yield {**settings, "mlp": True}
            yield {**settings, "mlp": False}
        if has_mlp:
            yield {"heads": None, "mlp": True}

    def build(self, parts: DecoderParts, settings: Settings) -> FusedLayer:
        if settings.get("mixer"):
            half = parts.attention
            mixer = FusedMixer(cast(Around, around(half)), half.body)
            return FusedLayer(mixer, self._mlp(parts), parts, self._collectives)
        attention = parts.attention if settings["heads"] is None else self._attention(parts, settings)
        mlp = self._mlp(parts) if settings["mlp"] else parts.mlp
        return FusedLayer(attention, mlp, parts, self._collectives)

    def tolerance(self, parts: DecoderParts, settings: Settings) -> float:
        return _TOLERANCE[parts.dtype]

    def replace_modules(self, text_model: nn.Module, head: nn.Module) -> None:
        """Replaces none."""

    def mixer(self, forward: StatefulForward) -> MixerKernel | None:
        return kernel_of(forward)

    def whole(self, parts: TextParts) -> FusedTextModel | None:
        layers = [layer for layer in parts.layers if isinstance(layer, FusedLayer)]
        norm, head = norm_of(parts.norm) if is_rms_norm(parts.norm) else None, cast(nn.Linear, parts.head)
        if norm is None or len(layers) < len(parts.layers) or not _is_head(head):
            return None
        if not all(layer.has_fused_attention for layer in layers):
            return None
        if self.is_timed:
            measure([*_matrices(layers), TrialProduct(head.weight, head.bias, is_whole=True)], self._choice)
        return FusedTextModel(parts.rotary, layers, norm, head, self._choice)

    def _attention(self, parts: DecoderParts, settings: Settings) -> FusedAttention:
        inner, heads = cast(AttentionParts, parts.attention.inner), Heads.from_json(settings["heads"])
        query_norm, key_norm = map(norm_of, inner.head_norms) if inner.head_norms else (None, None)
        rope = Rope(
            settings["rotary_width"], Rotation(settings["rotation"]), Table(settings["table"]),
            query_norm, key_norm, settings["norms_after"], settings["gated"],
        )  # fmt: skip
        sinks = getattr(parts.attention.body, "sinks", None)
        sinks = None if sinks is None else own_share(sinks)
        return FusedAttention(
            cast(Around, around(parts.attention)), self._product(inner.projections),
            self._product([inner.out]), rope, heads.num_query,
            replace(heads.attention, sinks=sinks), parts.layer_idx, self._attend,
        )  # fmt: skip

    def _mlp(self, parts: DecoderParts) -> FusedMlp:
        inner = cast(MlpParts, parts.mlp.inner)
        return FusedMlp(
            cast(Around, around(parts.mlp)), self._product(inner.inputs), self._product([inner.down]),
            cast(GateActivation, activation(parts)),
        )  # fmt: skip

    def _product(self, linears: Sequence[Linear]) -> Product:
        return cast(Product, product_of(linears, self._choice))


def _matrices(layers: Iterable[FusedLayer]) -> Iterator[TrialProduct]:
    for each in (each for layer in layers for each in layer.products):
        if isinstance(each.weight, Tensor):
            yield TrialProduct(each.weight, each.bias)


def _is_head(head: nn.Module) -> bool:
    return is_linear(head) or isinstance(head, GatheredLinear)
