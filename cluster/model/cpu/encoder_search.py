"""Finds the blocks of vision and audio encoders that one native call can run, and replaces their `forward`.

A block is recognised by the names and types of its parts; the tables below hold the names that families use.
The block and its replacement then run the same random rows: the replacement takes over only if it adds the
same to its input. A block that differs, or is not recognised, stays.

A replaced block stays in its tower, because transformers finds by class the blocks whose output it records.
It has no parts any more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, QuickGELUActivation, SiLUActivation

from cluster.model.attention_cpu import MAX_WIDTH
from cluster.model.cpu.encoder_layer import Activation, BlockParts, EncoderSteps, NativeEncoderLayer
from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import is_servable
from cluster.model.layers.parts import is_linear, is_rms_norm, pick
from cluster.model.layers.search import Settings
from cluster.model.layers.trial import ENCODER_TOLERANCES, agree

logger = logging.getLogger(__name__)

_TRIAL_LENGTHS = (5, 19, 1)  # of packed sequences
_TRIAL_SHAPE = (2, 7)  # of sequences of equal length
_TRIAL_SCALE = 0.1  # of the input, so that what a block of small weights adds does not vanish behind it

_NORMS = (
    ("norm1", "norm2"),
    ("layer_norm1", "layer_norm2"),
    ("self_attn_layer_norm", "final_layer_norm"),
)
_ATTENTIONS = ("attn", "self_attn")
_PROJECTIONS = (("qkv",), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
_OUTS = ("proj", "out_proj")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_PLAIN_MLPS = (("fc1", "fc2"), ("linear_fc1", "linear_fc2"))
_ACTIVATIONS = ("act_fn", "act", "activation_fn")
_KINDS: Mapping[type[nn.Module], Activation] = {
    GELUActivation: Activation.GELU,
    nn.GELU: Activation.GELU,
    GELUTanh: Activation.GELU_TANH,
    QuickGELUActivation: Activation.QUICK_GELU,
}


def optimise_encoder_layers(module: nn.Module, kernels: Kernels | None = None) -> int:
    """Replaces blocks anywhere in `module`, in place; returns how many. If this machine has no kernels, does
    nothing. Call it in evaluation mode, before `modules.optimise_modules`. Blocks: some seconds for a
    gigabyte of weights."""
    kernels = kernels or load()
    if kernels is None:
        return 0
    count = 0
    with torch.inference_mode():
        for blocks in [child for child in module.modules() if isinstance(child, nn.ModuleList)]:
            steps = EncoderSteps()
            for block in blocks:
                parts = _parts_of(block)
                native = None if parts is None else _replacement(block, parts, steps, kernels)
                if native is not None:
                    _replace(block, native)
                    count += 1
            logger.debug("%d blocks of %s looked at for native calls", len(blocks), type(module).__name__)
    logger.info("native CPU kernels (%s): %d encoder blocks replaced", kernels.variant, count)
    return count


def _replace(block: nn.Module, native: NativeEncoderLayer) -> None:
    for name in [name for name, _ in block.named_children()]:
        delattr(block, name)
    block.forward = native


def _replacement(
    block: nn.Module, parts: BlockParts, steps: EncoderSteps, kernels: Kernels
) -> NativeEncoderLayer | None:
    """A native call that agrees with `block`; None: there is none."""
    arguments = [*inspect.signature(block.forward).parameters][1:]
    x, keywords = _trial(parts, arguments)
    expected: list[Tensor] = []

    def candidates() -> Iterator[Settings]:
        result = block(x, **keywords)
        first, *others = result if isinstance(result, tuple) else (result,)
        if isinstance(first, Tensor) and not others:
            expected.append(first.float() - x.float())
            yield {"returns_tuple": isinstance(result, tuple)}

    def build(settings: Settings) -> NativeEncoderLayer:
        returns_tuple = settings["returns_tuple"]
        return NativeEncoderLayer(
            parts, kernels, steps, argument_names=arguments, returns_tuple=returns_tuple
        )

    def agrees(native: NativeEncoderLayer, _settings: Settings) -> bool:
        result = native(x, **keywords)
        added = (result[0] if isinstance(result, tuple) else result).float() - x.float()
        return agree(added, expected[0], ENCODER_TOLERANCES[parts.dtype])

    return kernels.weights.replacement(block, candidates(), build, agrees)


def _trial(parts: BlockParts, arguments: list[str]) -> tuple[Tensor, dict[str, object]]:
    """Random rows, and what the block is called with besides them."""
    generator = torch.Generator().manual_seed(0)
    is_packed = "cu_seqlens" in arguments
    shape = (sum(_TRIAL_LENGTHS),) if is_packed else _TRIAL_SHAPE
    x = torch.randn(*shape, parts.hidden_size, generator=generator) * _TRIAL_SCALE
    if not is_packed:
        return x.to(parts.dtype), {"attention_mask": None}
    lengths = torch.tensor([0, *_TRIAL_LENGTHS])
    keywords: dict[str, object] = {"cu_seqlens": lengths.cumsum(0).int()}
    if "position_embeddings" in arguments:
        angles = torch.randn(len(x), parts.head_width, generator=generator)
        keywords["position_embeddings"] = (angles.cos(), angles.sin())
    return x.to(parts.dtype), keywords


def _parts_of(block: nn.Module) -> BlockParts | None:
    """Finds the parts by their names and types; the comparison finds out whether it computes the same."""
    children = dict(block.named_children())
    norms = pick(children, *_NORMS)
    attention = next((children[name] for name in _ATTENTIONS if name in children), None)
    if norms is None or attention is None or not is_servable(block) or not all(map(_is_norm, norms)):
        return None
    inside = dict(attention.named_children())
    projections, out = pick(inside, *_PROJECTIONS), pick(inside, *((name,) for name in _OUTS))
    mlp = dict(children["mlp"].named_children()) if "mlp" in children else children
    activation = next((mlp[name] for name in _ACTIVATIONS if name in mlp), None)
    linears = pick(mlp, _GATED_MLP, *_PLAIN_MLPS)
    num_heads = getattr(attention, "num_heads", None)
    if projections is None or out is None or linears is None or not isinstance(num_heads, int):
        return None
    kind = _kind_of(activation, is_gated=len(linears) == 3)
    if kind is None or not all(map(is_linear, (*projections, *out, *linears))):
        return None
    *up, down = cast("list[nn.Linear]", linears)
    parts = BlockParts(
        norms[0], norms[1], cast("list[nn.Linear]", projections), cast(nn.Linear, out[0]), up, down, kind,
        num_heads,
    )  # fmt: skip
    return parts if _fits(parts) and _is_all_of(parts, block) else None


def _is_norm(module: nn.Module) -> bool:
    if is_rms_norm(module):
        return True
    return isinstance(module, nn.LayerNorm) and module.bias is not None and module.weight.ndim == 1


def _kind_of(activation: nn.Module | None, *, is_gated: bool) -> Activation | None:
    if is_gated:
        return Activation.GATED if isinstance(activation, (nn.SiLU, SiLUActivation)) else None
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return Activation.GELU_TANH
    return None if activation is None else _KINDS.get(type(activation))


def _fits(parts: BlockParts) -> bool:
    """Whether all parts have the sizes that the kernels need. Rows have an even length, because bfloat16 is
    read in pairs."""
    inner = parts.out.in_features
    biases = {linear.bias is None for linear in parts.up}
    return (
        inner == parts.num_heads * parts.head_width
        and sum(linear.out_features for linear in parts.projections) == 3 * inner
        and parts.head_width % 2 == 0
        and parts.head_width <= MAX_WIDTH
        and parts.hidden_size % 2 == 0
        and parts.down.in_features % 2 == 0
        and parts.out.out_features == parts.down.out_features == parts.hidden_size
        and len(biases) == 1
    )


def _is_all_of(parts: BlockParts, block: nn.Module) -> bool:
    def modules() -> Iterator[nn.Module]:
        yield from (
            parts.attention_norm,
            parts.mlp_norm,
            *parts.projections,
            parts.out,
            *parts.up,
            parts.down,
        )

    known = {id(parameter) for module in modules() for parameter in module.parameters()}
    return all(id(parameter) in known for parameter in block.parameters())
