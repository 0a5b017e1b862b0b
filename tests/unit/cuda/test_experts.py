"""Which experts get our launches: those that agree with transformers' products, and for the steps in which
they are faster. What the launches compute: test_cuda_experts.py, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.expert_parallel import MoEParamShard
from transformers.integrations.moe import grouped_mm_experts_forward

from cluster.model.cuda.expert_products import experts_forward
from cluster.model.cuda.experts import FEW_TOKENS, optimise_experts
from cluster.model.layers.codes import CodedExperts, CodeKind
from cluster.model.parallel import join_group, leave_group
from tests.fakes.cuda_device import CudaTensor, SimulatedCuda
from tests.fakes.strict_triton import strict_triton
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.model.test_cuda_experts import coded_and_plain, codes_of

FAMILIES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}


class Ours:
    """In place of the launches, with a clock that they move on, or back where they are faster."""

    def __init__(self, *, few: float = -0.5, many: float = -0.5, error: float = 0.0):
        self._costs, self._error, self._now, self.num_rows = (few, many), error, 0.0, []

    def __call__(self, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self._now += self._costs[len(x) > FEW_TOKENS]
        self.num_rows.append(len(x))
        return (1 + self._error) * grouped_mm_experts_forward(experts, x, chosen, weights)

    def clock(self) -> float:
        self._now += 1.0
        return self._now


def text_of(family: str) -> nn.Module:
    return FAMILIES[family]().model.model


@torch.inference_mode()
def served(text: nn.Module, ours: Ours) -> list[int]:
    """Of steps of 5 and 100 tokens those that ours computes, in every layer."""
    found = []
    for part in experts_of(text):
        ours.num_rows.clear()
        for num_tokens in (5, 100):
            chosen = torch.zeros(num_tokens, 2, dtype=torch.long)
            part(torch.randn(num_tokens, 64), chosen, torch.rand(num_tokens, 2))
        found.append(list(ours.num_rows))
    assert all(each == found[0] for each in found)
    return found[0]


def experts_of(text: nn.Module) -> list:
    return [part for part in text.modules() if hasattr(part, "has_post_expert_norm")]


@pytest.mark.parametrize(
    ("ours", "steps"),
    [(Ours(), [5, 100]), (Ours(many=0.5), [5]), (Ours(few=0.5), []), (Ours(error=0.1), [])],
    ids=["faster", "faster for few tokens", "slower", "other numbers"],
)
def test_launches_serve_what_they_compute_right_and_sooner(ours: Ours, steps: list[int]) -> None:
    text = text_of("qwen3_moe")
    assert optimise_experts(text, ours, ours.clock) == (len(experts_of(text)) if steps else 0)
    assert served(text, ours) == steps


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("muse_spark", lambda text: None),  # a norm follows its experts
        ("qwen3_moe", lambda text: text.set_experts_implementation("eager")),
        ("qwen3_moe", lambda text: text.double()),
    ],
)
def test_what_is_not_known_stays(family: str, change: Callable[[nn.Module], object]) -> None:
    text, ours = text_of(family), Ours()
    change(text)
    assert optimise_experts(text, ours) == 0 and not ours.num_rows


def test_a_model_without_experts_and_a_machine_without_triton_are_left_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr("cluster.model.cuda.experts.has_triton", lambda: False)
    assert optimise_experts(text_of("llama")) == 0 and not caplog.records
    assert optimise_experts(text_of("qwen3_moe")) == 0 and "triton cannot be used" in caplog.text


def test_a_launch_that_fails_is_named_in_the_log(device: SimulatedCuda, caplog) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("no such tile")

    text = device.put(text_of("qwen3_moe"))
    with caplog.at_level("INFO"):
        assert optimise_experts(text, fails) == 0
    assert "3 Qwen3MoeExperts: RuntimeError: no such tile" in caplog.text


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_a_step_is_two_launches_and_waits_for_nothing(num_tokens: int, device: SimulatedCuda) -> None:
    experts = experts_of(device.put(text_of("gpt_oss_sinks_window")))[0]
    x, chosen = CudaTensor(torch.randn(num_tokens, 64)), CudaTensor(torch.zeros(num_tokens, 2).long())
    num_syncs = device.num_syncs
    with strict_triton() as launches, torch.inference_mode():
        experts_forward(experts, x, chosen, CudaTensor(torch.rand(num_tokens, 2)))
    assert [launch.kernel for launch in launches] == ["cut_segments", "multiply_rows", "multiply_rows"]
    first, second = launches[1:]
    rows = first.arguments["ROWS"]
    tiles = 2 * num_tokens // rows + min(4, 2 * num_tokens)
    assert first.grid == (tiles, -(-2 * 96 // first.arguments["OUTPUTS"])) and second.grid == (tiles, 2)
    assert first.arguments["GATHERS"] and not second.arguments["GATHERS"]
    assert first.arguments["output_stride"] == 1  # these are transposed
    assert device.num_syncs == num_syncs


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 16), (127, 16), (128, 64)])
def test_a_step_of_codes_is_two_launches_as_well(num_tokens: int, rows: int, device: SimulatedCuda) -> None:
    """By tiles that follow from the rows of an expert, on average; nothing else is made of the codes."""
    experts = device.put(coded_and_plain("gpt_oss_sinks_window", "MXFP4")[0].bfloat16())
    x = CudaTensor(torch.randn(num_tokens, 64).bfloat16())
    chosen, weights = CudaTensor(torch.zeros(num_tokens, 2).long()), CudaTensor(torch.rand(num_tokens, 2))
    num_syncs = device.num_syncs
    with strict_triton() as launches, torch.inference_mode():
        experts_forward(experts, x, chosen, weights)
    assert [launch.kernel for launch in launches] == ["cut_segments", "multiply_rows", "multiply_rows"]
    for launch, name in zip(launches[1:], ("gate_up_proj", "down_proj"), strict=True):
        assert launch.arguments["ROWS"] == rows and launch.arguments["KIND"] == CodeKind.E2M1
        assert launch.arguments["weight"].data_ptr() == experts.get_submodule(name).numbers.data_ptr()
    assert device.num_syncs == num_syncs


def test_experts_of_codes_keep_their_function() -> None:
    text, ours = text_of("qwen3_moe"), Ours()
    for part in experts_of(text):
        codes, _ = codes_of("AWQ", tuple(part.down_proj.shape))
        del part.down_proj
        part.add_module("down_proj", CodedExperts(codes, 4))
    assert optimise_experts(text, ours, ours.clock) == 0 and not ours.num_rows


def test_a_rank_tries_its_own_share(tmp_path: Path) -> None:
    join_group(0, 1, tmp_path / "meeting", "cpu")
    try:
        text, mesh = text_of("qwen3_moe"), init_device_mesh("cpu", (1,))
        share = MoEParamShard(Shard(0), shards_expert_dim=True)
        for part in experts_of(text):
            for name in [name for name, _ in part.named_parameters()]:
                share.shard_param(part, name, mesh)
        ours = Ours()
        assert optimise_experts(text, ours, ours.clock) == 3
        assert all(isinstance(own, DTensor) for part in experts_of(text) for own in part.parameters())
    finally:
        leave_group()
