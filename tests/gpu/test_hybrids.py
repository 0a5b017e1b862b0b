"""Tiny hybrid models on a GPU in float32, with our kernels for their mixers: recorded steps of answers,
prompts in chunks next to them. The tokens are those of `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.language import LanguageModel
from tests.flow.hybrid_models import CONFIGS, OTHERS, save_hybrid
from tests.flow.text_models import draw_prompts, generated
from tests.gpu.cases import HYBRID_PLACES, hybrid_answers
from tests.gpu.device import triton_device

DEVICE, NUM_TOKENS, BLOCK_SIZE, NUM_KV = triton_device(), 12, 16, 8


@pytest.mark.parametrize("name", sorted(CONFIGS | OTHERS))
def test_recorded_steps_of_a_hybrid_give_the_tokens_of_generate(
    name: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    prompts, folder = draw_prompts((40, 5, 33)), save_hybrid(tmp_path, name)
    expected = generated(folder, prompts, NUM_TOKENS)
    model = LanguageModel.load(folder, dtype=torch.float32, device=DEVICE, block_size=BLOCK_SIZE)
    assert model.states is not None
    assert all(forward.kernel is not None for forward in model.states.forwards)
    recording = recording_of(model, RecordedSizes.up_to(4, 64))
    assert recording is not None and recording.sizes.mixed
    num_blocks = len(prompts) * (NUM_KV + HYBRID_PLACES * model.state_blocks)
    kv = BlockMemory(model.kv_layout, num_blocks + recording.num_blocks, DEVICE)
    steps = recording.over(model, kv)
    assert hybrid_answers(model, steps, kv, prompts, NUM_TOKENS, NUM_KV) == expected
