"""The parts of a language half, ready to compute: loaded, probed, with the attention and the kernels that
serve it on its device. `language` computes with them.

1. transformers loads the half (`loading`), or the packed weights of an earlier start are mapped
   (`cpu/weight_cache`).
2. A dummy token shows what the layers need from attention (`probe`).
3. Attention is chosen (`make_backend`), then the kernels that replace modules (`layers`).

Runs on the thread that loads the model. Blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.config.adapters import NO_ADAPTERS, AdapterRoom
from cluster.config.checkpoint import placeholder_ids
from cluster.config.families import ModelFamily
from cluster.config.machine import has_triton
from cluster.errors import ConfigError
from cluster.kvcache.memory import MemoryLayout
from cluster.model.adapters import WHOLE, AdaptedLinear, AdapterSlots, Share
from cluster.model.attention import ATTENTION_NAME, AttentionShape, LayerAttention, ModelAttention
from cluster.model.attention_cpu import CpuAttention
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.collectives import Collectives
from cluster.model.cpu.layer_search import CpuLayerKernels
from cluster.model.cpu.library import load as load_kernels
from cluster.model.cpu.modules import WeightDtype
from cluster.model.cpu.weight_cache import Making, WeightCache, WeightKey, load_through
from cluster.model.cuda.coded_choice import CODED_KERNELS
from cluster.model.cuda.coded_products import scratch_bytes
from cluster.model.cuda.experts import optimise_experts
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_shares
from cluster.model.half_files import CheckRoom, own_share
from cluster.model.kv_format import KvCacheDtype, kv_segments
from cluster.model.layers.codes import CodedLinear, CodedModule
from cluster.model.layers.mixers import replace_mixers
from cluster.model.layers.search import LayerKernels, replace_layers, whole_decoder
from cluster.model.layers.trial import Trial, WholeDecoder
from cluster.model.loading import Half, load_half
from cluster.model.mixer_shares import piece_of
from cluster.model.positions import RULES
from cluster.model.probe import Probed, check_post_head, kv_row_shapes, probe_backbone
from cluster.model.rank_linears import settle_linears
from cluster.model.sharding import Sharding, distributing, divided_oddly
from cluster.model.state_step import StepStates, install
from cluster.model.step_adapters import StepAdapters
from cluster.model.support import (
    check_class,
    family_of,
    head_of,
    head_owner,
    leave_out_query_scales,
    post_head,
    text_of,
)
from cluster.model.token_inputs import TokenInputs


@dataclass(frozen=True, kw_only=True)
class LanguageParts:
    model: PreTrainedModel
    family: ModelFamily
    text: PreTrainedModel
    embed: nn.Embedding
    inputs: TokenInputs
    head: nn.Module
    vocab_size: int
    post_head: Callable[[Tensor], Tensor] | None  # what the family does to the logits; None: nothing
    probed: Probed
    states: StepStates | None  # None: the model keeps nothing beside KV
    block_size: int
    kv_layout: MemoryLayout
    attention: ModelAttention
    weight_bytes: int  # of this rank's share
    scratch_bytes: int  # of plain weights that a step makes of codes, one after the other
    decoder: WholeDecoder | None = None  # runs a step in one call, if one can
    evictable_bytes: int = 0  # of weights in a mapped file that are not locked in memory
    adapters: AdapterSlots | None = None  # that its linears may add; None: there is no room for any
    collectives: Collectives | None  # of a rank


def load_parts(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, block_size: int,
    kv_cache_dtype: KvCacheDtype, weight_dtype: WeightDtype, sharding: Sharding,
    weight_cache: WeightCache | None, adapters: AdapterRoom = NO_ADAPTERS,
    check_room: CheckRoom | None = None,
) -> LanguageParts:  # fmt: skip
    """Arguments as in `LanguageModel.load`. Raises ConfigError."""
    num_ranks = sharding.num_ranks

    ranks = Collectives(torch.device(device)) if num_ranks > 1 else None

    def make(making: Making) -> LanguageParts:
        half = load_half(
            path, Half.LANGUAGE, dtype=dtype, device=device, sharding=sharding, mapped=making.mapped,
            coded=CODED_KERNELS if has_coded_kernels else None, collectives=ranks, check_room=check_room,
        )  # fmt: skip
        notes = making.notes.get("probed")
        probed = None if notes is None else Probed.from_json(notes)
        if ranks is not None:
            settle_linears(half, ranks)
            if half.device.type == "cuda":
                merge_shares(half, half.device)
        with distributing(half.config.model_type, num_ranks):
            parts = probed_parts(half, block_size, kv_cache_dtype, probed, ranks)
        if parts.embed.weight.device.type == "cuda":
            optimise_experts(parts.text)
        making.notes["probed"] = parts.probed.to_json()
        ours = _layer_kernels(parts, weight_dtype, making)
        if ranks is not None and (adapters.num_slots or not ranks.all_agree(ours is not None)):
            ours = None
        if adapters.num_slots:
            parts = _adapted(parts, adapters, num_ranks)
        served = parts if ours is None else on_kernels(parts, ours)
        if weight_dtype != "auto" and served.head is parts.head:
            raise ConfigError(
                f"weight_dtype {weight_dtype} needs the native CPU kernels; the log says why they are missing"
            )
        return replace(served, evictable_bytes=making.evictable_bytes)

    has_coded_kernels = torch.device(device).type == "cuda" and has_triton()
    kernels = load_kernels() if torch.device(device).type == "cpu" and num_ranks == 1 else None
    key = WeightKey(Path(path), Half.LANGUAGE, dtype, weight_dtype, adapters.modules)
    return load_through(weight_cache, key, kernels, make)


def probed_parts(
    model: PreTrainedModel, block_size: int, kv_cache_dtype: KvCacheDtype,
    probed: Probed | None = None, collectives: Collectives | None = None,
) -> LanguageParts:  # fmt: skip
    """Returns the parts with transformers' own modules. probed: what probing this model gave before; None: it
    is probed. collectives: of a rank. Raises ConfigError for everything that is not supported."""
    family, text = family_of(model.config), text_of(model)
    check_class(type(text))
    leave_out_query_scales(text)
    embed = cast(nn.Embedding, model.get_input_embeddings())
    head, after = head_of(model), post_head(model.config)
    if probed is None:
        probed = probe_backbone(text, model.config.get_text_config().hidden_size)
        check_post_head(model, text, after)
    shapes = probed.shapes
    text.set_attn_implementation(ATTENTION_NAME)
    dtype, device = embed.weight.dtype, embed.weight.device
    segments = kv_segments(kv_row_shapes(shapes), block_size, dtype, kv_cache_dtype)
    layout = MemoryLayout(segments)
    states = install(text, probed.states, probed.attention, layout) if probed.states else None
    first = kv_segments(kv_row_shapes(shapes[:1]), block_size, dtype, kv_cache_dtype)
    shape = _attention_shape(model, text, probed, MemoryLayout(first), block_size)
    # by address: of tied weights, ranks hold one share under two names
    weights = {
        own.data_ptr() or id(own): own
        for own in map(own_share, {*text.parameters(), *embed.parameters(), *head.parameters()})
    }.values()
    coded = [module for module in text.modules() if isinstance(module, CodedModule)]
    linears = [module for module in coded if isinstance(module, CodedLinear)]
    return LanguageParts(
        model=model,
        family=family,
        text=text,
        embed=embed,
        inputs=_token_inputs(model, family, text, embed),
        head=head,
        vocab_size=head.out_features,
        post_head=after,
        probed=probed,
        states=states,
        block_size=block_size,
        kv_layout=layout,
        attention=make_backend(device, dtype, shape),
        weight_bytes=sum(own.nbytes for own in weights) + sum(module.codes.nbytes for module in coded),
        # gate and up are one matrix
        scratch_bytes=max((2 * scratch_bytes(linear.codes, dtype) for linear in linears), default=0),
        collectives=collectives,
    )


def _adapted(parts: LanguageParts, room: AdapterRoom, num_ranks: int) -> LanguageParts:
    share = Share(dist.get_rank(), num_ranks) if num_ranks > 1 else WHOLE
    weight = parts.embed.weight
    slots = AdapterSlots(parts.text, room, weight.device, weight.dtype, share)
    if num_ranks > 1:
        linears = [module for module in parts.text.modules() if isinstance(module, AdaptedLinear)]
        odd = divided_oddly(parts.model, [linear for linear in linears if piece_of(linear.base) is None])
        if odd and not room.is_open:
            raise ConfigError(
                f"an adapter changes '{odd[0].path}', which ranks divide in a way in which adapters are not",
                param="adapters",
            )
        slots.leave_out(odd)
    if parts.states is not None:
        parts.states.adapters = slots.step
    return replace(parts, adapters=slots, weight_bytes=parts.weight_bytes + slots.num_bytes)


def _token_inputs(
    model: PreTrainedModel, family: ModelFamily, text: PreTrainedModel, embed: nn.Embedding
) -> TokenInputs:
    read_as = family.reads_placeholders_as
    if read_as is None:
        return TokenInputs(text, embed)
    replaced = [*placeholder_ids(model.config.to_dict()).values()]
    named = getattr(model.config.get_text_config(), read_as) if isinstance(read_as, str) else read_as
    return TokenInputs(text, embed, replaced, named)


def make_backend(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape | None = None
) -> ModelAttention:
    """The fastest installed backend for the device; on CUDA, that for `shape`. Each backend reads every cache
    format. If its kernels do not support a case, it uses the torch backend."""
    if device.type == "cuda" and shape is not None:
        from cluster.model.cuda.choice import choose

        return choose(device, dtype, shape, fallback=TorchAttention())
    kernels = load_kernels() if device.type == "cpu" else None
    return TorchAttention() if kernels is None else CpuAttention(kernels.cdll, fallback=TorchAttention())


def _attention_shape(
    model: PreTrainedModel, text: PreTrainedModel, probed: Probed, layout: MemoryLayout, block_size: int
) -> AttentionShape:
    """Returns the shape of the first layer, as this rank has it."""
    config = model.config.get_text_config()
    (kv_heads, width), first = probed.shapes[0].key, config.per_layer_config[0]
    num_heads = first.num_attention_heads
    group = num_heads // (getattr(first, "num_key_value_heads", None) or num_heads)
    if probed.attention:  # of a hybrid model, whose ranks may have the same KV head
        group = getattr(text.get_submodule(probed.attention[0]), "num_key_value_groups", group)
    layer = LayerAttention(width**-0.5, softcap=getattr(config, "attn_logit_softcapping", None))
    return AttentionShape(layout, block_size, kv_heads * group, layer)


def _layer_kernels(parts: LanguageParts, weight_dtype: WeightDtype, making: Making) -> LayerKernels | None:
    """Those of the device that holds the weights; None: it has none."""
    dtype, device = parts.embed.weight.dtype, parts.embed.weight.device
    if device.type == "cpu":
        kernels = making.kernels_for(parts.model)
        return None if kernels is None else CpuLayerKernels(kernels, weight_dtype)
    if not isinstance(parts.attention, CudaAttention):
        return None
    return CudaLayerKernels(dtype, parts.attention, collectives=parts.collectives)


def on_kernels(parts: LanguageParts, kernels: LayerKernels) -> LanguageParts:
    """Puts the kernels in place of all modules that they can replace. Slots of adapters are empty then."""
    slots = parts.adapters
    if slots is not None:
        slots.fill()
    trial = Trial(
        parts.text, parts.kv_layout, parts.attention, RULES[parts.family.positions].with_axes,
        adapters=StepAdapters() if slots is None else slots.step, collectives=parts.collectives,
    )  # fmt: skip
    parts = _replaced(parts, kernels, trial)
    if slots is not None:
        slots.clear()
    return parts


def _replaced(parts: LanguageParts, kernels: LayerKernels, trial: Trial) -> LanguageParts:
    replace_layers(parts.text, kernels, trial)
    if (head := kernels.replace_modules(parts.text, parts.head)) is not None:
        head_owner(parts.model).set_output_embeddings(head)  # the old one's weights are not kept
        parts = replace(parts, head=head)
    if parts.states is not None and parts.collectives is None:
        parts.states.keep_mixers_of(parts.text)
        replace_mixers(parts.states, kernels, parts.embed.embedding_dim)
    if parts.post_head is not None:
        return parts
    return replace(parts, decoder=whole_decoder(parts.text, parts.head, kernels, trial))
