"""Mixers of hybrid models by our Triton kernels, in Triton's interpreter, which has to be asked for:
TRITON_INTERPRET=1. Outputs and states are those of transformers' mixers, for answers, prompts and states that
are kept within a prompt."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as hf

from cluster.kvcache.memory import MemoryLayout
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.kv_format import kv_segments
from cluster.model.layers.mixers import replace_mixers
from cluster.model.probe import probe_backbone
from cluster.model.state_step import StepStates, install

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
HIDDEN = 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "pad_token_id": None, "eos_token_id": None,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# wider than a program's tile, and no powers of two
WIDE = {**DELTA, "linear_key_head_dim": 24, "linear_value_head_dim": 40}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5Text": ("Qwen3_5ForCausalLM", WIDE),
    "Qwen3Next": ("Qwen3NextForCausalLM", DELTA),
    "OlmoHybrid": ("OlmoHybridForCausalLM", DELTA),
    "Lfm2": ("Lfm2ForCausalLM", CONV),
    "Lfm3": ("Lfm3ForCausalLM", CONV),
}


def stateful(name: str, dtype: torch.dtype) -> StepStates:
    torch.manual_seed(0)
    model, changes = FORMS[name]
    text = getattr(hf, model)(getattr(hf, f"{name}Config")(**SIZES, **changes)).to(dtype).eval().model
    for parameter in text.parameters():
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    probed = probe_backbone(text, HIDDEN)
    return install(text, probed.states, probed.attention, MemoryLayout(kv_segments([(1, 16)] * 2, 16, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_a_mixer_is_replaced_as_it_agrees(name: str, dtype: torch.dtype, caplog) -> None:
    step = stateful(name, dtype)
    attention = CudaAttention(TorchAttention(), num_processors=2)
    assert replace_mixers(step, CudaLayerKernels(dtype, attention, is_timed=False), HIDDEN) == 1, caplog.text
