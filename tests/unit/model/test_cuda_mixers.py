"""Mixers of hybrid models by our Triton kernels, in Triton's interpreter, which has to be asked for:
TRITON_INTERPRET=1. Outputs and states are those of transformers' mixers, for answers, prompts and states that
are kept within a prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.mixers import kernel_of
from cluster.model.kv_format import kv_segments
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import on_kernels, probed_parts
from cluster.model.layers.mixers import replace_mixers
from cluster.model.probe import probe_backbone
from cluster.model.state_step import StepState, StepStates, install
from cluster.model.states import StateSpan
from tests.fakes.far_memory import far_ids, far_memory
from tests.fakes.interpreted_bfloat16 import rounded_bfloat16
from tests.flow.hybrid_models import CONFIGS, save_hybrid
from tests.flow.text_models import draw_prompts, generated
from tests.gpu.cases import HYBRID_PLACES, hybrid_answers

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
BLOCKS = ["linear_attention", "full_attention"]
# Of Mamba 2: sizes that are no powers of two; groups; limits that most steps of time pass
BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 80, "mamba_d_state": 24,
    "mamba_n_groups": 2, "mamba_expand": 5, "mamba_chunk_size": 8, "mamba_conv_bias": False,
    "mamba_d_conv": 3, "time_step_limit": (0.6, 0.8),
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "layers_block_type": BLOCKS, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 80,
    "n_groups": 1, "chunk_size": 8, "use_bias": True, "time_step_min": 0.5,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 3,
    "mamba_chunk_size": 8, "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.9, 1.2, 0.6, 1.1, 0.8],
}  # fmt: skip
KIMI: dict[str, Any] = {
    "layer_types": BLOCKS, "mlp_layer_types": ["dense"] * 2, "num_key_value_heads": 2, "linear_num_heads": 3,
    "linear_head_dim": 24, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "num_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5Text": ("Qwen3_5ForCausalLM", WIDE),
    "Qwen3Next": ("Qwen3NextForCausalLM", DELTA),
    "OlmoHybrid": ("OlmoHybridForCausalLM", DELTA),
    "Lfm2": ("Lfm2ForCausalLM", CONV),
    "Lfm3": ("Lfm3ForCausalLM", CONV),
    "KimiLinear": ("KimiLinearForCausalLM", KIMI),
    "BailingHybrid": ("BailingHybridForCausalLM", KIMI),
    "BailingHybrid, unbounded": ("BailingHybridForCausalLM", {**KIMI, "kda_safe_gate": False}),
    "Bamba": ("BambaForCausalLM", BAMBA),
    "NemotronH": ("NemotronHForCausalLM", NEMOTRON),
    "FalconH1": ("FalconH1ForCausalLM", FALCON),
    "FalconH1, norm first": (
        "FalconH1ForCausalLM",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "FalconH1, gate first": (
        "FalconH1ForCausalLM",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
}


def stateful(name: str, dtype: torch.dtype) -> StepStates:
    torch.manual_seed(0)
    model, changes = FORMS[name]
    text = (
        getattr(hf, model)(getattr(hf, f"{name.partition(',')[0]}Config")(**{**SIZES, **changes}))
        .to(dtype)
        .eval()
        .model
    )
    for parameter in text.parameters():
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    probed = probe_backbone(text, HIDDEN)
    return install(text, probed.states, probed.attention, MemoryLayout(kv_segments([(1, 16)] * 2, 16, dtype)))


@pytest.fixture(autouse=True)
def bfloat16() -> Iterator[None]:
    with rounded_bfloat16():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_a_mixer_is_replaced_as_it_agrees(name: str, dtype: torch.dtype, caplog) -> None:
    step = stateful(name, dtype)
    attention = CudaAttention(TorchAttention(), num_processors=2)
    replaced = replace_mixers(step, CudaLayerKernels(dtype, attention, is_timed=False), HIDDEN)
    assert replaced == len(step.forwards) > 0, caplog.text


@pytest.mark.parametrize("name", ["Qwen3_5Text", "OlmoHybrid", "Bamba", "KimiLinear"])
def test_prompts_of_several_chunks_are_those_of_the_module(name: str) -> None:
    """Beside an answer; one prompt keeps states within it, and both go on with one. All tokens of the second
    are the same: their keys are, too, which is the worst that its systems can be."""
    (forward,) = stateful(name, torch.float32).forwards
    kernel, layout = kernel_of(forward), forward.layout
    assert kernel is not None
    size = layout.num_blocks
    a, b, c, d, e, f, g = (range(i * size, (i + 1) * size) for i in range(7))
    steps = (
        [[StateSpan(3, (), a)], [StateSpan(140, (), b)], [StateSpan(70, (), c), StateSpan(41, c, d)]],
        [[StateSpan(1, a, e)], [StateSpan(65, b, f)], [StateSpan(17, d, c), StateSpan(64, c, g)]],
    )
    theirs, ours = (BlockMemory(layout.kv_layout, 7 * size, torch.device("cpu")) for _ in range(2))
    for number, sequences in enumerate(steps):
        counts = [sum(span.num_tokens for span in own) for own in sequences]
        rows = 0.5 * torch.randn(sum(counts), HIDDEN)
        rows[counts[0] : counts[0] + counts[1]] = rows[0]
        expected = forward.run_module(rows, StepState(layout, theirs, sequences))
        actual = kernel(rows, StepState(layout, ours, sequences))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=f"step {number}")


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Bamba", "Lfm2"])
def test_states_may_lie_anywhere_in_a_large_memory(name: str) -> None:
    (forward, *_) = stateful(name, torch.float32).forwards
    kernel, layout = kernel_of(forward), forward.layout
    assert kernel is not None
    size, rows = layout.num_blocks, 0.5 * torch.randn(24, HIDDEN)
    near = BlockMemory(layout.kv_layout, 4 * size, torch.device("cpu"))
    far = far_memory(layout.kv_layout, as_a_whole=True)
    found = []
    for memory in (near, far):
        ids = far_ids(memory, 4 * size)
        a, b, c, d = (ids[i * size : (i + 1) * size] for i in range(4))
        steps = [[StateSpan(17, (), a)], [StateSpan(5, (), b)]], [[StateSpan(1, a, c)], [StateSpan(1, b, d)]]
        answers = [kernel(rows[:22], StepState(layout, memory, steps[0]))]
        answers.append(kernel(rows[22:], StepState(layout, memory, steps[1])))
        found.append([*answers, *(segment[ids.start :] for segment in memory.segments)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_a_model_with_mixers_runs_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fused layers alone, one after the other: logits of a prompt and of an answer are the modules'. One
    has gated attention, one short convolutions."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    own = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in own.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    plain = probed_parts(own, 16, "auto")
    model, found = LanguageModel(plain), []

    def logits() -> list[torch.Tensor]:
        size = model.state_blocks
        kv = BlockMemory(model.kv_layout, 2 + 2 * size, model.device)
        a, b = range(2, 2 + size), range(2 + size, 2 + 2 * size)
        prompt = SequenceChunk([*range(3, 23)], 0, 0, [0, 1], states=(StateSpan(20, (), a),))
        answer = SequenceChunk([7], 20, 20, [0, 1], states=(StateSpan(1, a, b),))
        return [model.forward([chunk], kv) for chunk in (prompt, answer)]

    expected = logits()
    with torch.inference_mode():
        merge_inputs(own, torch.device("cpu"))
    attention = CudaAttention(TorchAttention(), num_processors=2)
    kernels = CudaLayerKernels(torch.float32, attention, is_timed=False)
    parts = on_kernels(replace(plain, attention=attention), kernels)
    assert parts.decoder is not None and parts.states is not None
    assert all(forward.kernel is not None for forward in parts.states.forwards)
    model = LanguageModel(parts)
    monkeypatch.setattr(parts.text, "forward", found.append)  # the whole runs without it
    torch.testing.assert_close(logits(), expected, rtol=1e-3, atol=1e-3)
    assert not found


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "kimi_linear"])
def test_a_model_on_kernels_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    """A prompt in two chunks, a state kept within the second, then answers; another prompt beside them."""
    prompts, folder = draw_prompts((40, 5)), save_hybrid(tmp_path, name)
    own = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    plain = probed_parts(own, 16, "auto")
    assert plain.states is not None
    kernels = CudaLayerKernels(
        torch.float32, CudaAttention(TorchAttention(), num_processors=2), is_timed=False
    )
    for forward in plain.states.forwards:
        forward.kernel = kernels.mixer(forward)
        assert forward.kernel is not None
    model = LanguageModel(plain)
    num_blocks = len(prompts) * (4 + HYBRID_PLACES * model.state_blocks)
    kv = BlockMemory(model.kv_layout, num_blocks, model.device)
    assert hybrid_answers(model, model, kv, prompts, 4, 4) == generated(folder, prompts, 4)
