"""Tiny models of every family on a GPU in float32: layers by our kernels where they are recognised, prompts
in chunks next to answers. The tokens are those of `generate`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_cuda import CudaAttention
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs
from cluster.model.language import LanguageModel
from cluster.model.language_parts import on_kernels, probed_parts
from tests.gpu.device import triton_device
from tests.unit.model.test_cuda_whole_layer import EXPECTED, MODELS, generated, greedy, what_is_fused

DEVICE = triton_device()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_family_gives_the_tokens_of_generate(name: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = MODELS[name]().model.eval()
    expected = generated(model)
    nn.Module.to(model, DEVICE)
    parts = probed_parts(model, 16, "auto")
    assert isinstance(parts.attention, CudaAttention)
    with torch.inference_mode():
        merge_inputs(parts.model, DEVICE)
    kernels = CudaLayerKernels(torch.float32, parts.attention, is_timed=False)
    fused = on_kernels(parts, kernels)
    assert name not in EXPECTED or what_is_fused(fused) == EXPECTED[name]
    assert greedy(LanguageModel(fused), BlockMemory(fused.kv_layout, 4, DEVICE)) == expected
