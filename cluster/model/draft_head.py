"""A head that drafts tokens: one decoder layer over [embedding of a token, hidden row of the token before
it].

    row i = layer(token i, hidden row of token i - 1; rows before i)     predicts token i + 1
    a guess: row i + 1 takes the guessed token and row i itself, in place of the target's hidden row

The target's hidden rows come from `hidden_rows`. Embeddings are the target's. KV rows are stored at the index
of the token that they take, in a block memory of one layer that the caller owns
(`cluster.engine.head_drafts`).

    MtpModule     the layer of the served checkpoint, in transformers' own modules
    Eagle3Module  see `eagle3`

Runs on the engine's thread. Owns the head's weights, and uses the target's embeddings and, for MTP, its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import ContextManagers

from cluster.config.checkpoint import check_weights, weight_files
from cluster.config.draft_heads import check_mtp
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import ATTENTION_NAME, AttentionShape, LayerAttention, ModelAttention
from cluster.model.batches import SequenceChunk, packed_step
from cluster.model.dequantising import check_values, forget_entries, plain_tensors
from cluster.model.expert_layout import stored_tensors
from cluster.model.failures import LOADING_ERRORS
from cluster.model.kv_format import kv_segments
from cluster.model.language import LanguageModel
from cluster.model.language_parts import make_backend
from cluster.model.loading import read_config
from cluster.model.probe import LayerShape, kv_row_shapes


class HeadModule(Protocol):
    """Letters: T tokens, H numbers of a hidden row, W of a row as the target keeps it."""

    def fused(self, rows: Tensor) -> Tensor:
        """[T, W], as `HiddenRows` keeps them → [T, H]."""
        ...

    def __call__(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, paged: Any) -> Tensor:
        """embeds and hidden [1, T, H], position_ids [1, T] → [1, T, H]. `paged`: see `paged_attention`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] of the call → [n, vocab_size of the target]."""
        ...


class DraftHead:
    """kv_layout: of the head's one layer."""

    def __init__(
        self, module: HeadModule, target: LanguageModel, shape: LayerShape, num_heads: int, hidden_size: int
    ):
        """shape: of the layer's K and V."""
        self._module, self._target = module, target
        self.hidden_size, self.dtype, self.device = hidden_size, target.dtype, target.device
        self.block_size = target.block_size
        self.kv_layout = MemoryLayout(kv_segments(kv_row_shapes([shape]), target.block_size, target.dtype))
        attention = LayerAttention(shape.key[1] ** -0.5)
        self._attention: ModelAttention = make_backend(
            target.device,
            target.dtype,
            AttentionShape(self.kv_layout, target.block_size, num_heads, attention),
        )

    @torch.inference_mode()
    def fused(self, rows: Tensor) -> Tensor:
        """Rows of the target [T, W] as `forward` takes them, [T, hidden_size]."""
        return self._module.fused(rows)

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[SequenceChunk], hidden: Tensor, kv: BlockMemory
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size]: of the token before each of the chunks' T tokens. Writes the tokens' KV.
        Returns [n, vocab_size] float32 logits and [n, hidden_size] for the n tokens that want logits: what
        follows each of them, and its row for the next guess. On a GPU everything is enqueued."""
        step = packed_step(chunks, kv, self.block_size, self.device, self._target.inputs.known_ids)
        embeds, paged = self._target.inputs.rows(step.token_ids), (step.batch, self._attention)
        rows = self._module(embeds[None], hidden[None], step.position_ids[None], paged)[0]
        if len(step.wanted) == 0:
            return rows.new_empty(0, self._target.vocab_size), rows[:0]
        wanted = rows[step.wanted]
        return self._module.logits(wanted).float(), wanted


class MtpModule:
    """The first layer for multi-token prediction. Further ones are not used: it is repeated."""

    def __init__(self, mtp: MtpModel, rotary: nn.Module, target: LanguageModel):
        self._layer, self._rotary, self._target = mtp.layers[0], rotary, target

    def fused(self, rows: Tensor) -> Tensor:
        return rows

    def __call__(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, paged: Any) -> Tensor:
        return self._layer(
            embeds,
            hidden,
            position_embeddings=self._rotary(embeds, position_ids=position_ids),
            attention_mask=None,
            position_ids=position_ids,
            past_key_values=None,
            paged=paged,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.logits_of(hidden)


def load_mtp(folder: Path, target: LanguageModel) -> DraftHead:
    """The MTP layer of the target's own checkpoint. Blocks while it is read. Raises ConfigError if the
    checkpoint has none, or one that does not fit."""
    config = read_config(folder)
    forget_entries(config)
    try:
        mtp, rotary = _read_mtp(folder, config, target)
    except (ValueError, RuntimeError, *LOADING_ERRORS) as error:
        raise ConfigError(
            f"speculation method mtp: transformers cannot load the layer of '{folder}': {error}",
            param="decode.speculation.method",
        ) from error
    num_heads = config.get_text_config().num_attention_heads
    return DraftHead(MtpModule(mtp, rotary, target), target, target.shapes[-1], num_heads, target.hidden_size)


def _read_mtp(folder: Path, config: PreTrainedConfig, target: LanguageModel) -> tuple[MtpModel, nn.Module]:
    """As `MtpModel.from_pretrained`, but without the main model's weights, and from quantised checkpoints,
    too."""
    prefix, text = check_mtp(folder), config.get_text_config()
    if target.state_blocks:  # transformers' configurations do not say that these have one
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    with ContextManagers(MtpModel.get_init_context(target.dtype, False, False, None)):
        main = AutoModelForCausalLM.from_config(text, dtype=target.dtype)
        mtp = MtpModel(main, 1)
    rotary = cast(Any, main.get_decoder()).rotary_emb
    quantisation, files = check_weights(folder).quantisation, weight_files(folder)
    del mtp.embed_tokens, mtp.shared_head, mtp.rotary_emb
    with ExitStack() as opened:
        every = plain_tensors(files, quantisation, target.dtype) if quantisation else stored_tensors(files)
        found = opened.enter_context(every)
        tensors = {name: tensor for name, tensor in found.items() if name.startswith(prefix)}
        check_values(tensors)
        how = LoadStateDictConfig(
            weight_mapping=mtp.get_weight_conversions(main), device_map={"": "cpu"}, dtype=target.dtype
        )
        report, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=tensors, load_config=how)
    if wrong := sorted(map(str, (*report.missing_keys, *report.mismatched_keys))):
        raise ValueError(f"it lacks weights, or has others: {', '.join(wrong[:5])}")
    mtp.set_attn_implementation(ATTENTION_NAME)
    own_rotary = type(rotary)(config=mtp.config)
    return mtp.eval().requires_grad_(False).to(target.device), own_rotary.to(target.device)
