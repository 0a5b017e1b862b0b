"""Decoder layers of transformers from our kernels and plain products, in Triton's interpreter, which has to
be asked for: TRITON_INTERPRET=1. Two layers in ten launches each and a last norm, over paged KV: two prompts
in two chunks, then a token more."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.cuda.layer_calls import (
    ActivationKind,
    GateActivation,
    Norm,
    NormForm,
    Rope,
    add_norm,
    gate,
    rope_write,
)
from cluster.model.cuda.paged_attention import attend, plan, step_tensors, tiles_for
from cluster.model.kv_format import kv_segments, layer_cache

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
    ),
    pytest.mark.usefixtures("seeded"),
]
BLOCK_SIZE = 4
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    model: Any  # the text model, without its head
    form: NormForm
    activation: GateActivation
    has_head_norms: bool = False
    has_post_norms: bool = False


def family(name: str) -> Family:
    if name == "qwen2":
        return Family(hf.Qwen2Model(hf.Qwen2Config(**SIZES)), NormForm.ROUNDED, GateActivation())
    if name == "qwen3":
        model = hf.Qwen3Model(hf.Qwen3Config(**SIZES))
        return Family(model, NormForm.ROUNDED, GateActivation(), has_head_norms=True)
    config = hf.Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=16)
    activation = GateActivation(ActivationKind.GELU_TANH)
    return Family(hf.Gemma2Model(config), NormForm.PLUS_ONE, activation, has_post_norms=True)


class Fused:
    """The layers of a family, with merged matrices. KV in `kv`, whose blocks are given to each step."""

    def __init__(self, family: Family, kv: BlockMemory):
        self.family, self.kv = family, kv
        self.layers = family.model.layers
        for layer in self.layers:
            projections = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
            layer.qkv = torch.cat([each.weight for each in projections])
            has_bias = projections[0].bias is not None
            layer.qkv_bias = torch.cat([each.bias for each in projections]) if has_bias else None
            layer.gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])

    def norm(self, module: Any) -> Norm:
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return Norm(module.weight, epsilon, self.family.form)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: PagedBatch) -> Tensor:
        """x [T, N], changed. Returns the last norm's result."""
        step, plans, product, post = step_tensors(batch), {}, None, None
        for index, layer in enumerate(self.layers):
            attention, cache = layer.self_attn, layer_cache(self.kv, index)
            tiles = tiles_for(4, cache, x.dtype)
            window = getattr(attention, "sliding_window", None)
            if window not in plans:
                plans[window] = plan(step, tiles, window)
            settings = LayerAttention(
                attention.scaling, window, getattr(attention, "attn_logit_softcapping", None)
            )
            head_norms: dict[str, Any] = {}
            if self.family.has_head_norms:
                head_norms = {
                    "query_norm": self.norm(attention.q_norm),
                    "key_norm": self.norm(attention.k_norm),
                }
            y = add_norm(x, product, self.norm(layer.input_layernorm), post=post)
            qkv = nn.functional.linear(y, layer.qkv, layer.qkv_bias)[None]
            query = rope_write(qkv, cos, sin, batch.slots, cache, 4, Rope(16, **head_norms))
            mixed = attend(query, cache, settings, step, plans[window], tiles, num_processors=1)
            product = attention.o_proj(mixed.flatten(1))[None]
            pre, post = layer.post_attention_layernorm, None
            if self.family.has_post_norms:
                pre, post = layer.pre_feedforward_layernorm, self.norm(layer.post_attention_layernorm)
            y = add_norm(x, product, self.norm(pre), post=post)
            gated = gate(nn.functional.linear(y, layer.gate_up)[None], self.family.activation, x.dtype)
            product = layer.mlp.down_proj(gated)[None]
            post = self.norm(layer.post_feedforward_layernorm) if self.family.has_post_norms else None
        return add_norm(x, product, self.norm(self.family.model.norm), post=post)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_layers_of_our_kernels_equal_the_modules(name: str) -> None:
    subject = family(name)
    model = subject.model.eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    kv = BlockMemory(MemoryLayout(kv_segments([(2, 16)] * 4, BLOCK_SIZE, torch.float32)), 12)
    fused = Fused(subject, kv)
    tokens = [torch.randint(0, 40, (length,)) for length in (11, 5)]
    tables = torch.tensor([[3, 9, 1, 0], [7, 2, 5, 0]])
    expected = [model(each[None]).last_hidden_state[0] for each in tokens]
    for spans in ([(0, 7), (0, 4)], [(7, 10), (4, 5)], [(10, 11)]):
        rows = [(seq, torch.arange(start, end)) for seq, (start, end) in enumerate(spans)]
        positions = torch.cat([each for _, each in rows])
        slots = [tables[seq][each // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE for seq, each in rows]
        contexts = [end for _, end in spans]
        batch = PagedBatch(
            kv, BLOCK_SIZE, torch.cat(slots), [end - start for start, end in spans], contexts,
            tables[: len(spans)], torch.tensor(contexts), [()] * len(spans),
        )  # fmt: skip
        embeds = model.embed_tokens(torch.cat([tokens[seq][each] for seq, each in rows]))
        cos, sin = model.rotary_emb(embeds[None], positions[None])
        out = fused(embeds.clone(), cos[0], sin[0], batch)
        right = torch.cat([expected[seq][each] for seq, each in rows])
        torch.testing.assert_close(out, right, rtol=2e-5, atol=2e-5)
