"""Decoder layers are recognised by the names and types of their modules: whole, or one half of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from cluster.model.layers.parts import DecoderParts, LayerHalf, decoder_parts

_TINY: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def parts_of(model: Any) -> DecoderParts | None:
    return decoder_parts(model.layers[0])


def norms_of(half: LayerHalf) -> str:
    return " ".join(name for name in ("pre", "post") if getattr(half, name) is not None)


@pytest.mark.parametrize(
    ("text", "norms", "num_matrices", "num_head_norms"),
    [
        (lambda: hf.LlamaModel(hf.LlamaConfig(**_TINY)), "pre", (4, 3), 0),
        (lambda: hf.Qwen3Model(hf.Qwen3Config(**_TINY)), "pre", (4, 3), 2),
        (lambda: hf.Phi3Model(hf.Phi3Config(**_TINY)), "pre", (2, 2), 0),
        (lambda: hf.Gemma2Model(hf.Gemma2Config(**_TINY)), "pre post", (4, 3), 0),
        (lambda: hf.Glm4Model(hf.Glm4Config(**_TINY)), "pre post", (4, 2), 0),
        (lambda: hf.Olmo2Model(hf.Olmo2Config(**_TINY)), "post", (4, 3), 2),
    ],
    ids=["llama", "qwen3", "phi3", "gemma2", "glm4", "olmo2"],
)
def test_both_halves_are_recognised(text, norms: str, num_matrices: tuple[int, int], num_head_norms: int):
    parts = parts_of(text())
    assert parts is not None and parts.attention.inner is not None and parts.mlp.inner is not None
    assert (norms_of(parts.attention), norms_of(parts.mlp)) == (norms, norms)
    assert len(parts.attention.inner.projections) + 1 == num_matrices[0]
    assert len(parts.mlp.inner.inputs) + 1 == num_matrices[1]
    assert len(parts.attention.inner.head_norms) == num_head_norms


def test_the_attention_of_a_layer_with_experts_is_recognised_alone():
    parts = parts_of(hf.Qwen3MoeModel(hf.Qwen3MoeConfig(**_TINY, **_EXPERTS)))
    assert parts is not None and parts.attention.inner is not None and parts.mlp.inner is None


def test_the_factor_of_a_residual_is_a_part():
    parts = parts_of(hf.GraniteModel(hf.GraniteConfig(**_TINY, residual_multiplier=0.5)))
    assert parts is not None and (parts.attention.scale, parts.mlp.scale) == (0.5, 0.5)


def test_other_layers_are_not_recognised():
    assert parts_of(hf.CohereModel(hf.CohereConfig(**_TINY))) is None
    listened_to: Any = hf.LlamaModel(hf.LlamaConfig(**_TINY))
    listened_to.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert parts_of(listened_to) is None
    larger = hf.LlamaModel(hf.LlamaConfig(**_TINY))
    larger.layers[0].adapter = nn.Linear(16, 16)
    assert parts_of(larger) is None


@pytest.mark.parametrize(
    "text",
    [
        lambda: hf.Gemma2Model(hf.Gemma2Config(**_TINY)),
        lambda: hf.Olmo2Model(hf.Olmo2Config(**_TINY)),
        lambda: hf.GraniteModel(hf.GraniteConfig(**_TINY, residual_multiplier=0.5)),
        lambda: hf.GptOssModel(hf.GptOssConfig(**_TINY, num_local_experts=4)),
    ],
    ids=["two norms", "norms after", "factor", "experts"],
)
@torch.inference_mode()
def test_two_halves_run_by_their_modules_are_the_layer(text):
    torch.manual_seed(0)
    model = text().eval()
    parts = parts_of(model)
    assert parts is not None
    x, positions = torch.randn(1, 5, 16), torch.arange(5)[None]
    given = {"position_embeddings": model.rotary_emb(x, positions), "attention_mask": None}
    middle = parts.attention.run_modules(x, **given)
    torch.testing.assert_close(parts.mlp.run_modules(middle), parts.layer(x, **given))
