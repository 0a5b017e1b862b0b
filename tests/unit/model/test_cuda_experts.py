"""Products of experts in Triton's interpreter, against transformers' grouped ones. The interpreter has to be
asked for: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from cluster.model.cuda.expert_products import experts_forward
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
FAMILIES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}


def experts_of(family: str) -> Any:
    model = FAMILIES[family]().model
    return next(part for part in model.modules() if hasattr(part, "_is_expert_parallel"))


def choices(num_tokens: int, num_experts: int, num_chosen: int = 2) -> tuple[Tensor, Tensor]:
    """Different experts of each token, of which the first has no token, and weights."""
    draw = torch.Generator().manual_seed(3)
    scores = torch.rand(num_tokens, num_experts, generator=draw)
    scores[:, 0] = -1
    return scores.topk(num_chosen).indices, torch.rand(num_tokens, num_chosen, generator=draw)


@torch.inference_mode()
def check(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, tolerance: float = 1e-6) -> None:
    ours, theirs = (
        each(experts, x, chosen, weights) for each in (experts_forward, grouped_mm_experts_forward)
    )
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("num_tokens", [1, 5, 80])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss_sinks_window", "aria"])
def test_products_equal_grouped_ones(family: str, num_tokens: int) -> None:
    """Plain, transposed with biases and a gate of their own, transposed."""
    experts = experts_of(family)
    check(experts, torch.randn(num_tokens, 64), *choices(num_tokens, len(experts.down_proj)))


def test_weights_of_float32_are_not_rounded() -> None:
    experts = experts_of("mixtral").half()
    x, (chosen, weights) = torch.randn(20, 64).half(), choices(20, 4)
    check(experts, x, chosen, weights, tolerance=3e-3)
    check(experts, x, chosen, weights.half(), tolerance=3e-3)


def test_a_rank_computes_its_own_experts_alone() -> None:
    experts = experts_of("qwen3_moe")
    chosen, weights = choices(20, 4)
    chosen[3] = 4  # both experts of the token are another rank's
    chosen[::2, 1] = 4
    weights = weights.masked_fill(chosen == 4, 0.0)
    vars(experts).update(_is_expert_parallel=True)
    check(experts, torch.randn(20, 64), chosen, weights)
    with torch.inference_mode():
        assert not experts_forward(experts, torch.randn(20, 64), chosen, weights)[3].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@torch.inference_mode()
def test_the_first_rows_have_the_same_bits_in_any_company(num_tokens: int) -> None:
    """They lie at the same places of their tiles. At other places numpy, which multiplies here, rounds
    otherwise; a GPU does not: tests/gpu/test_experts.py."""
    experts, x, (chosen, weights) = experts_of("qwen3_moe"), torch.randn(90, 64), choices(90, 4)
    together = experts_forward(experts, x, chosen, weights)
    alone = experts_forward(experts, x[:num_tokens], chosen[:num_tokens], weights[:num_tokens])
    assert torch.equal(alone, together[:num_tokens])
