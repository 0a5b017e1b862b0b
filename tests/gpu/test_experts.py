"""Experts on a GPU: our launches give what transformers' grouped products give, recorded as well, and a row
has the same bits in any company. So do those of codes, which have not run on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from cluster.model.cuda.expert_products import experts_forward
from cluster.model.layers.trial import agree
from tests.gpu.device import triton_device
from tests.unit.model.test_cuda_experts import CODED, choices, coded_and_plain, experts_of

DEVICE = triton_device()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss_sinks_window", "aria"])
@torch.inference_mode()
def test_launches_equal_grouped_products(family: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    experts = experts_of(family)
    nn.Module.to(experts, DEVICE, dtype)
    x = torch.randn(300, 64, device=DEVICE, dtype=dtype)
    chosen, weights = (each.to(DEVICE) for each in choices(300, 4))
    together = experts_forward(experts, x, chosen, weights)
    assert agree(together, grouped_mm_experts_forward(experts, x, chosen, weights), TOLERANCES[dtype])
    for rows in (slice(0, 1), slice(7, 30), slice(299, 300)):
        alone = experts_forward(experts, x[rows], chosen[rows], weights[rows])
        assert torch.equal(alone, together[rows])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = experts_forward(experts, x, chosen, weights)
    graph.replay()
    assert torch.equal(recorded, together)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("family", "form"), [*(("wide", form) for form in CODED), ("gpt_oss_sinks_window", "MXFP4")]
)
@torch.inference_mode()
def test_codes_give_the_products_of_their_weights(family: str, form: str, dtype, monkeypatch) -> None:
    """300 tokens of 4 experts take the tiles of many rows."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    coded, plain = coded_and_plain(family, form)
    nn.Module.to(plain, DEVICE, dtype)
    for name, parameter in coded.named_parameters():
        coded.register_parameter(name, nn.Parameter(parameter.to(DEVICE, dtype), requires_grad=False))
    nn.Module.to(coded, DEVICE)
    x = torch.randn(300, 288 if family == "wide" else 64, device=DEVICE, dtype=dtype)
    chosen, weights = (each.to(DEVICE) for each in choices(300, 4))
    together = experts_forward(coded, x, chosen, weights)
    assert agree(together, grouped_mm_experts_forward(plain, x, chosen, weights), TOLERANCES[dtype])
    for rows in (slice(0, 1), slice(7, 30), slice(200, 300)):
        assert torch.equal(experts_forward(coded, x[rows], chosen[rows], weights[rows]), together[rows])
