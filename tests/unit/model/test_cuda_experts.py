"""Products of experts in Triton's interpreter, against transformers' grouped ones. The interpreter has to be
asked for: TRITON_INTERPRET=1."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from cluster.config.weight_formats import Header, read_entry
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.dequantising import FusedSlice
from cluster.model.layers.codes import CodedExperts, CodeKind, Codes, alike
from tests.fakes.slow_params import often
from tests.flow.quantised_folders import MXFP4_ENTRY, in_mxfp4
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.model.test_cuda_coded_products import case

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
FAMILIES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}


def experts_of(family: str) -> Any:
    if family == "wide":  # several steps of columns, the last one in part
        config = hf.Qwen3MoeConfig(hidden_size=288, moe_intermediate_size=96, num_experts=4)
        experts = type(experts_of("qwen3_moe"))(config)
        for each in experts.parameters():
            nn.init.normal_(each, std=0.1)
        return experts
    model = FAMILIES[family]().model
    return next(part for part in model.modules() if hasattr(part, "_is_expert_parallel"))


CODED = ("fp8 in blocks of 16", "W4A16", "W4A16 in groups of 32", "GPTQ of 8 bits", "AWQ", "MXFP4")


def codes_of(form: str, shape: tuple[int, int, int]) -> tuple[Codes, Tensor]:
    """Random matrices of experts [experts, rows, columns], and what they stand for, in float32."""
    num_experts, num_rows, width = shape
    if form != "MXFP4":
        cases = [case(form, (num_rows, width), seed) for seed in range(num_experts)]
        parts = alike([each.codes for each in cases])
        assert parts is not None
        tensors = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("numbers", "scales", "zeros")
            if getattr(parts[0], name) is not None
        }
        return replace(parts[0], **tensors), torch.stack([each.plain for each in cases])
    name = "layer.experts.down_proj"
    stored = {name + part: each for part, each in in_mxfp4(torch.randn(num_experts, width, num_rows)).items()}
    headers = {each: Header("U8", tuple(tensor.shape)) for each, tensor in stored.items()}
    form_read = read_entry("mxfp4", MXFP4_ENTRY, "gpt_oss")
    read = FusedSlice(form_read.stored(name, headers)[1], form_read, stored, torch.float32)
    parts = [matrix.codes(name) for matrix in read.matrices()]
    numbers, scales = (torch.cat([getattr(part, each) for part in parts]) for each in ("numbers", "scales"))
    return replace(parts[0], numbers=numbers, scales=scales), read[...]


def coded_and_plain(family: str, form: str) -> tuple[Any, Any]:
    """The family's experts, with codes, and with the weights that these stand for."""
    plain: Any = experts_of(family)
    coded = copy.deepcopy(plain)
    for name in ("gate_up_proj", "down_proj"):
        shape = tuple(plain.get_parameter(name).shape)
        experts, rows, columns = (shape[0], *shape[:0:-1]) if plain.is_transposed else shape
        codes, weight = codes_of(form, (experts, rows, columns))
        weight = weight.transpose(1, 2).contiguous() if plain.is_transposed else weight
        plain.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        delattr(coded, name)
        coded.add_module(name, CodedExperts(codes, experts))
    return coded, plain


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


def test_mxfp4_codes_are_what_the_reader_dequantises() -> None:
    codes, plain = codes_of("MXFP4", (3, 40, 160))
    assert codes.kind is CodeKind.E2M1 and codes.scales.dtype == torch.uint8
    assert torch.equal(codes.plain(torch.float32).view(plain.shape), plain)
    assert torch.equal(CodedExperts(codes, 3).of(1).plain(torch.float32), plain[1])


@pytest.mark.parametrize("num_tokens", often([1, 5, 130], (5, 130)))
@pytest.mark.parametrize(
    ("family", "form"), [*(("wide", form) for form in CODED), ("gpt_oss_sinks_window", "MXFP4")]
)
@torch.inference_mode()
def test_products_of_codes_are_those_of_the_weights(family: str, form: str, num_tokens: int) -> None:
    """In 16 bits, too: weights are rounded to them, as the plain ones are. More than 128 tokens of 4 experts
    have tiles of their own there."""
    coded, plain = coded_and_plain(family, form)
    x = torch.randn(num_tokens, 288 if family == "wide" else 64)
    chosen, weights = choices(num_tokens, 4)
    exact, half = (torch.float32, 1e-6), (torch.float16, 1e-3)
    for dtype, tolerance in (half,) if num_tokens == 130 else (exact, half):
        rows = x.to(dtype), chosen, weights.to(dtype)
        found = experts_forward(coded.to(dtype) if dtype != torch.float32 else coded, *rows)
        expected = grouped_mm_experts_forward(plain.to(dtype), *rows)
        assert (found - expected).norm() <= tolerance * expected.norm()
