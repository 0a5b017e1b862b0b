"""The head of EAGLE-3 (Li, Wei, Zhang, Zhang 2025, "EAGLE-3: Scaling up inference acceleration of large
language models via training-time test"), in the published form: `LlamaForCausalLMEagle3`.

    fc          three hidden rows of the target, side by side → one
    midlayer    a Llama decoder layer whose attention takes [norm(embedding), norm(hidden row)]: twice as wide
    norm, head  → logits of a reduced vocabulary; d2t[i] + i is the target's id of its token i

The row that `midlayer` gives is the hidden row of the next guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from cluster.config.draft_heads import Eagle3Head
from cluster.errors import ConfigError
from cluster.model.attention import ATTENTION_NAME
from cluster.model.draft_head import DraftHead
from cluster.model.language import LanguageModel
from cluster.model.probe import LayerShape

_FILES = ("model.safetensors", "pytorch_model.bin")
# which ids have a draft id; the target's embeddings are used; what old versions of transformers have saved
_UNUSED = ("t2d", "embed_tokens.weight", "rotary_emb.inv_freq")


class _Midlayer(nn.Module):
    def __init__(self, config: hf.LlamaConfig, norm_before_residual: bool):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(
                self.self_attn, name, nn.Linear(2 * width, narrow.out_features, bias=config.attention_bias)
            )
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)  # of the embedding
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self._norm_before_residual = norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        hidden = residual + self.self_attn(both, attention_mask=None, **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Module(nn.Module):
    def __init__(self, config: hf.LlamaConfig, head: Eagle3Head, vocab_size: int):
        """vocab_size: of the target."""
        super().__init__()
        self._vocab_size = vocab_size
        self.fc = nn.Linear(len(head.layers) * head.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Midlayer(config, bool(head.config.get("norm_before_residual")))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, head.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(head.draft_vocab_size, dtype=torch.int64))
        self.rotary = LlamaRotaryEmbedding(config)

    def fused(self, rows: Tensor) -> Tensor:
        return self.fc(rows)

    def forward(self, embeds: Tensor, hidden: Tensor, position_ids: Tensor, paged: Any) -> Tensor:
        rotary = self.rotary(embeds, position_ids=position_ids)
        return self.midlayer(embeds, hidden, position_embeddings=rotary, paged=paged)

    def logits(self, hidden: Tensor) -> Tensor:
        """-inf for tokens that the head does not know."""
        drafted = self.lm_head(self.norm(hidden))
        ids = torch.arange(len(self.d2t), device=hidden.device) + self.d2t
        return drafted.new_full((len(hidden), self._vocab_size), -torch.inf).index_copy_(1, ids, drafted)


def load_eagle3(head: Eagle3Head, target: LanguageModel) -> DraftHead:
    """Blocks while the head is read. Raises ConfigError if its weights do not fit its configuration."""
    fields = {
        name: value for name, value in head.config.items() if name not in ("architectures", "model_type")
    }
    try:
        config = hf.LlamaConfig(**fields)
        config._attn_implementation = ATTENTION_NAME
        module = Eagle3Module(config, head, target.vocab_size)
    except Exception as error:  # whatever a wrong field makes transformers raise
        raise _error(head.folder, f"config.json: {' '.join(str(error).split())}") from error
    tensors = {name: tensor for name, tensor in _read(head.folder).items() if not name.endswith(_UNUSED)}
    if "d2t" not in tensors and head.draft_vocab_size == target.vocab_size:
        tensors["d2t"] = module.d2t  # both have the same ids
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise _error(head.folder, " ".join(str(error).split())) from error
    ids = torch.arange(len(module.d2t)) + module.d2t
    if len(ids.unique()) < len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
        raise _error(head.folder, f"d2t names tokens twice, or not of the {target.vocab_size} of the model")
    module = module.eval().requires_grad_(False).to(target.device)
    for parameter in module.parameters():  # frequencies of the rotary embedding stay exact
        parameter.data = parameter.data.to(target.dtype)
    kv = (config.num_key_value_heads, config.head_dim)
    return DraftHead(module, target, LayerShape(kv, kv, None), config.num_attention_heads, config.hidden_size)


def _read(folder: Path) -> dict[str, Tensor]:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise _error(folder, f"it has none of the files {', '.join(_FILES)}")
    try:
        return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    except Exception as error:  # whatever a damaged file makes them raise
        raise _error(folder, f"{file.name} cannot be read: {error}") from error


def _error(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the EAGLE-3 head '{folder}' cannot be loaded: {reason}", param="decode.speculation.model"
    )
