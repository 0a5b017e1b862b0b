"""Whole tiny models whose decoder layers are our Triton kernels and plain products, in Triton's interpreter,
which has to be asked for: TRITON_INTERPRET=1. Every form of norm, rotation, activation and layer that the
families have is recognised, or left to its module; greedy tokens are those of `generate`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.layer import CudaLayerKernels, FusedLayer
from cluster.model.cuda.merging import merge_inputs
from cluster.model.kv_format import KvCacheDtype
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import LanguageParts, on_kernels, probed_parts
from cluster.model.step_model import StepModel
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
MODELS = {**TEXT_FAMILIES, **MEDIA_FAMILIES}
WHOLE, LAYERS, ATTENTION, MLP = "one chain", "layers alone", "attention alone", "mlp alone"
EXPECTED = {
    "llama": WHOLE,
    "qwen2": WHOLE,
    "qwen3": WHOLE,
    "mistral_window": WHOLE,
    "phi3_window": WHOLE,  # merged projections, a part of each head turns
    "gemma3_window": WHOLE,  # norms on both sides, a table for each type of layer
    "smollm3": WHOLE,  # layers without a rotation
    "glm4": WHOLE,  # pairs turn
    "hunyuan_vl": WHOLE,  # heads are normed after they turn
    "qwen2_5_vl": WHOLE,
    "qwen3_vl": WHOLE,
    "gemma2_softcap_window": LAYERS,  # the model changes its logits after the head
    "granite_logits_scaling": LAYERS,
    "qwen3_moe": ATTENTION,
    "gpt_oss_sinks_window": ATTENTION,
    "olmo2": MLP,  # norms over all heads together
    "deepseek_v3_mla": MLP,  # its first layer alone has no experts
    "cohere2_logit_scale": None,  # both halves read one norm
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 20, 21], [50, 51, 52]]
TABLES = [[0, 1], [2, 3]]
NUM_TOKENS = 4


def fused(name: str, kv_cache_dtype: KvCacheDtype = "auto") -> LanguageParts:
    parts = probed_parts(MODELS[name]().model.eval(), 16, kv_cache_dtype)
    with torch.inference_mode():
        merge_inputs(parts.model, torch.device("cpu"))
    attention = CudaAttention(TorchAttention(), num_processors=2)
    kernels = CudaLayerKernels(torch.float32, attention, is_timed=False)
    return on_kernels(replace(parts, attention=attention), kernels)


def what_is_fused(parts: LanguageParts) -> str | None:
    layers = [layer for layer in parts.text.modules() if isinstance(layer, FusedLayer)]
    if not layers:
        return None
    has_attention, has_mlp = (
        all(getattr(layer, name) for layer in layers) for name in ("has_fused_attention", "has_fused_mlp")
    )
    if has_attention and has_mlp:
        return LAYERS if parts.decoder is None else WHOLE
    return ATTENTION if has_attention else MLP


def greedy(model: StepModel, kv: BlockMemory, adapters: Sequence[int] = (0, 0)) -> list[list[int]]:
    """Of both prompts side by side: one in two chunks, beside an answer."""
    of_long, of_short = adapters
    first = [SequenceChunk(PROMPTS[0][:7], 0, 0, TABLES[0], num_logits=0, adapter=of_long)]
    first.append(SequenceChunk(PROMPTS[1], 0, 0, TABLES[1], adapter=of_short))
    answers: list[list[int]] = [[], [int(model.forward(first, kv).argmax())]]
    second = [SequenceChunk(PROMPTS[0][7:], 7, 7, TABLES[0], adapter=of_long)]
    second.append(SequenceChunk([answers[1][0]], 3, 3, TABLES[1], adapter=of_short))
    for answer, token in zip(answers, model.forward(second, kv).argmax(-1).tolist(), strict=True):
        answer.append(token)
    while len(answers[0]) < NUM_TOKENS:
        contexts = [len(prompt) + len(answer) - 1 for prompt, answer in zip(PROMPTS, answers, strict=True)]
        last = [answer[-1] for answer in answers]
        tokens = model.decode(last, contexts, [0, 0], TABLES, kv, adapters).argmax(-1).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    return [answer[:NUM_TOKENS] for answer in answers]


def generated(whole: Any) -> list[list[int]]:
    """What the whole model answers to the prompts."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = whole.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS, do_sample=False,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_of_our_kernels_gives_the_tokens_of_generate(name: str) -> None:
    parts = fused(name)
    assert what_is_fused(parts) == EXPECTED[name]
    model = LanguageModel(parts)
    assert greedy(model, BlockMemory(model.kv_layout, 4)) == generated(MODELS[name]().model.eval())


@pytest.mark.parametrize("name", ["qwen3", "gemma3_window"])
def test_int8_kv_is_that_of_the_modules(name: str) -> None:
    models = (
        LanguageModel(fused(name, "int8")),
        LanguageModel.from_model(MODELS[name]().model, kv_cache_dtype="int8"),
    )
    ours, plain = (greedy(model, BlockMemory(model.kv_layout, 4)) for model in models)
    assert ours == plain
