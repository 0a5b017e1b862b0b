"""What of a decoder layer our kernels can compute: its products, norms and activation as they are recognised,
and the forms that a rotation may have, which are tried. `layer` makes halves of them. Runs on the engine's
thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from cluster.model.adapters import merged_updates, without_adapters
from cluster.model.collectives import Collectives
from cluster.model.cuda.adapter_products import add_adapters
from cluster.model.cuda.coded_products import coded_product
from cluster.model.cuda.forms import activation_of, norm_of
from cluster.model.cuda.layer_calls import GateActivation, Norm, Rotation, Table, total
from cluster.model.cuda.merging import merged_linears
from cluster.model.cuda.paged_attention import MAX_WIDTH
from cluster.model.cuda.products import UNMEASURED, ProductChoice, product
from cluster.model.layers.codes import CodedLinear, Codes
from cluster.model.layers.parts import AttentionParts, DecoderParts, LayerHalf, Linear
from cluster.model.layers.search import Settings
from cluster.model.layers.trial import NUM_TOKENS, Heads, Observed
from cluster.model.rank_linears import SummedLinear
from cluster.model.slot_matrices import SlotMatrices
from cluster.model.state_step import StatefulForward

_NO_ROTATION = (0, Rotation.HALVES, Table.FULL)


@dataclass(frozen=True)
class Product:
    """weight [M, N]: of one linear, or of several with one input."""

    weight: Tensor | Codes
    bias: Tensor | None
    updates: SlotMatrices | None  # of LoRA adapters
    collectives: Collectives | None = None  # that sum it over the ranks
    choice: ProductChoice = UNMEASURED

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] → shares [S, T, M]; of a sum over the ranks one, in x's dtype."""
        if isinstance(self.weight, Codes):
            shares = coded_product(x, self.weight, self.bias)
        else:
            shares = product(x, self.weight, self.bias, self.choice)
        if self.updates is not None:
            add_adapters(shares[0], x, self.updates)
        if self.collectives is None:
            return shares
        return self.collectives.sum(total(shares, x.dtype))


def product_of(adapted: Sequence[Linear], choice: ProductChoice = UNMEASURED) -> Product | None:
    """None: their weights are not one matrix."""
    linears = cast("list[nn.Linear]", [*map(without_adapters, adapted)])
    if (parts := merged_linears(linears)) is None:
        return None
    summed = linears[0].collectives if isinstance(linears[0], SummedLinear) else None
    return Product(*parts, merged_updates(adapted), summed, choice)


@dataclass(frozen=True)
class Around:
    """What a half of a layer does around its body."""

    pre: Norm | None
    post: Norm | None
    scale: float | None


def around(half: LayerHalf) -> Around | None:
    """None: one of the norms is of no known form."""
    norms = [None if module is None else norm_of(module) for module in (half.pre, half.post)]
    modules = (half.pre, half.post)
    if any(module is not None and norm is None for module, norm in zip(modules, norms, strict=True)):
        return None
    return Around(norms[0], norms[1], None if half.scale == 1 else half.scale)


def is_mixer(parts: DecoderParts) -> bool:
    """Whether the first half has a mixer that keeps states, between norms that we know."""
    own = vars(parts.attention.body).get("forward")
    return isinstance(own, StatefulForward) and around(parts.attention) is not None


def ropes(parts: DecoderParts, observed: Observed) -> Iterator[Settings]:
    """Forms of the rotation that the half may have; none: it cannot be fused."""
    inner, heads = parts.attention.inner, observed.heads
    if inner is None or heads is None or around(parts.attention) is None or not _fit(inner, heads):
        return
    is_gated = _outputs(inner) > _rows(heads)
    head_norms = [norm_of(module) for module in inner.head_norms]
    if None in head_norms or len({norm.form for norm in head_norms if norm is not None}) > 1:
        return
    for width, rotation, table in (*_rotations(observed.rotary, heads.key_width), _NO_ROTATION):
        for norms_after in (False, True) if head_norms and width else (False,):
            yield {
                "rotary_width": width, "rotation": int(rotation), "table": int(table),
                "norms_after": norms_after, "gated": is_gated,
            }  # fmt: skip


def _rotations(rotary: object, key_width: int) -> Iterator[tuple[int, Rotation, Table]]:
    if not (isinstance(rotary, tuple) and len(rotary) == 2):
        return
    cos, sin = rotary
    if cos.shape != sin.shape or cos.shape[:-1] != (1, NUM_TOKENS):
        return
    width = cos.shape[-1]
    if width <= key_width:
        yield width, Rotation.HALVES, Table.FULL
        yield width, Rotation.PAIRS, Table.PAIRED
        yield width, Rotation.PAIRS, Table.FULL
    if 2 * width <= key_width:
        yield 2 * width, Rotation.HALVES, Table.HALF


def _outputs(inner: AttentionParts) -> int:
    linears = map(without_adapters, inner.projections)
    return sum(len(each.codes.numbers if isinstance(each, CodedLinear) else each.weight) for each in linears)


def _rows(heads: Heads) -> int:
    """Numbers of q, k and v of a token."""
    return heads.num_query * heads.key_width + heads.num_kv * (heads.key_width + heads.value_width)


def _fit(inner: AttentionParts, heads: Heads) -> bool:
    """Whether all parts have the sizes of this attention, or of one whose answers are gated by as many more
    outputs of q's projection, and q, k and v are one product."""
    gates = heads.num_query * heads.key_width
    can_be_gated = len(inner.projections) == 3 and heads.key_width == heads.value_width
    return (
        max(heads.key_width, heads.value_width) <= MAX_WIDTH
        and _outputs(inner) - _rows(heads) in ((0, gates) if can_be_gated else (0,))
        and product_of(inner.projections) is not None
        and all(norm.get_parameter("weight").numel() == heads.key_width for norm in inner.head_norms)
    )


def activation(parts: DecoderParts) -> GateActivation | None:
    """None: the half cannot be fused."""
    inner = parts.mlp.inner
    if inner is None or around(parts.mlp) is None or product_of(inner.inputs) is None:
        return None
    return activation_of(inner.activation, next(parts.layer.parameters()))
