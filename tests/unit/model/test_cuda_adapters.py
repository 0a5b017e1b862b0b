"""Fused layers with LoRA adapters, in Triton's interpreter, which has to be asked for: TRITON_INTERPRET=1.
Greedy tokens are those of PEFT's own model, of two sequences with different adapters side by side."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cluster.config.adapters import read_adapters, room_for
from cluster.kvcache.memory import BlockMemory
from cluster.model.adapters import AdapterSlots
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.adapter_products import add_adapters
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs
from cluster.model.language import LanguageModel
from cluster.model.language_parts import on_kernels, probed_parts
from cluster.model.slot_matrices import SlotMatrices, Update
from cluster.model.step_adapters import StepAdapters
from tests.flow.adapter_folders import adapters_of
from tests.flow.tiny_models import TinyRequest
from tests.unit.model.test_cuda_whole_layer import (
    ATTENTION,
    LAYERS,
    MODELS,
    NUM_TOKENS,
    PROMPTS,
    WHOLE,
    greedy,
    what_is_fused,
)

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
EXPECTED = {
    "llama": WHOLE,  # three linears of one product, of which an adapter changes two
    "qwen2": WHOLE,
    "qwen3": WHOLE,
    "phi3_window": WHOLE,  # linears that were merged before they were adapted
    "gemma2_softcap_window": LAYERS,
    "qwen3_moe": ATTENTION,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fused_model_with_adapters_gives_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    case = MODELS[name]()
    case.requests = [TinyRequest().raw(*prompt) for prompt in PROMPTS]
    folders, answers = adapters_of(case, tmp_path, None)
    adapters = read_adapters(folders, 16)
    parts = probed_parts(case.model, 16, "auto")
    with torch.inference_mode():
        merge_inputs(parts.model, torch.device("cpu"))
    slots = AdapterSlots(parts.text, room_for(adapters), torch.device("cpu"), torch.float32)
    attention = CudaAttention(TorchAttention(), num_processors=2)
    parts = replace(parts, attention=attention, adapters=slots)
    parts = on_kernels(parts, CudaLayerKernels(torch.float32, attention, is_timed=False))
    assert what_is_fused(parts) == EXPECTED[name]
    model = LanguageModel(parts)
    for slot, adapter in enumerate(adapters, 1):
        model.write_adapter(slot, model.read_adapter(adapter))
    for pair in ((1, 2), (3, 1)):
        expected = [answers[adapters[slot - 1].name][i][:NUM_TOKENS] for i, slot in enumerate(pair)]
        assert greedy(model, BlockMemory(model.kv_layout, 4), pair) == expected


@pytest.mark.parametrize("times", [1, 3], ids=["few rows", "rows in the order of their slots"])
@torch.inference_mode()
def test_each_row_has_what_its_own_slot_adds(times: int) -> None:
    """Three slots of different ranks, one of them empty, in two of three linears of one product; rows without
    an adapter keep their bits, and so does a row in other company."""
    step = StepAdapters(3, 20)
    places = [("q", 0, 40), ("v", 100, 333)]  # a tile of outputs has both
    updates = SlotMatrices(places, 70, 333, step, torch.device("cpu"), torch.float32)
    for slot, rank in ((1, 20), (3, 2)):
        pieces = {
            path: Update(torch.randn(rank, 70), torch.randn(end - begin, rank)) for path, begin, end in places
        }
        updates.write_slot(slot, pieces)
    x, y = torch.randn(7 * times, 70), torch.randn(7 * times, 333)
    slots = torch.tensor([0, 3, 1, 2, 0, 1, 3] * times)
    with step.of_step(slots):
        expected, together = y.clone(), y.clone()
        updates.add_to(expected, x)
        add_adapters(together, x, updates)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(together[[0, 3, 4]], y[[0, 3, 4]])
    with step.of_step(slots[5:6]):
        alone = y[5:6].clone()
        add_adapters(alone, x[5:6], updates)
    assert torch.equal(alone[0], together[5]) and not torch.equal(alone[0], y[5])
    updates.write_slot(3, {})
    with step.of_step(slots):
        add_adapters(now := y.clone(), x, updates)
    assert torch.equal(now[1], y[1]) and torch.equal(now[2], together[2])
