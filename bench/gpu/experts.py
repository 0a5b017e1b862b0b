"""Times of one layer's experts, of the forms of Qwen3-30B-A3B and Qwen3-235B-A22B with random weights: by our
launches, and by transformers' grouped products; then by our launches with weights that are codes. All from
graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.gpu.formats import EXPERT_FORMS
from bench.gpu.machine import DeviceSpeed, replayed_s
from bench.gpu.served import Measurements
from cluster.model.cuda.coded_choice import fault_of_experts
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.layers.codes import CodedExperts, ExpertsForward

_FORMS: dict[str, dict[str, Any]] = {
    "30B-A3B": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
    "235B-A22B": {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128},
}
_TINY: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4}
_NUM_CHOSEN, _TOKENS, _NUM_STEPS = 8, (1, 16, 64, 512, 2048), 8
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.inference_mode()
def times(speed: DeviceSpeed, rehearse: bool) -> Measurements:
    """us: by our launches (on the CPU by torch); grouped_us: by transformers' grouped products. gb_per_s: of
    the matrices that were chosen. right: whether products of codes are those of the plain weights."""
    ours = grouped_mm_experts_forward if rehearse else experts_forward  # which needs triton
    for name, form in {"tiny": _TINY}.items() if rehearse else _FORMS.items():
        config = hf.Qwen3MoeConfig(**form, num_experts_per_tok=_NUM_CHOSEN)
        with torch.device(speed.device):
            experts: Any = Qwen3MoeExperts(config).to(speed.dtype).eval()
        for each in experts.parameters():
            each.normal_(std=0.02)
        inputs = [
            [_rows(config, num_tokens, speed) for _ in range(2 if rehearse else _NUM_STEPS)]
            for num_tokens in ((1, 16) if rehearse else _TOKENS)
        ]
        for steps in inputs:
            theirs_s = replayed_s(_calls(grouped_mm_experts_forward, experts, steps), speed.device)
            yield {**_timed(name, ours, experts, steps, speed), "grouped_us": 1e6 * theirs_s}
        sizes = [(each, *experts.get_parameter(each).shape) for each in ("gate_up_proj", "down_proj")]
        for form_name, coded in EXPERT_FORMS.items():
            for leaf, num_experts, num_rows, width in sizes:
                delattr(experts, leaf)
                codes = coded.codes(num_experts * num_rows, width, speed.device)
                if rehearse:
                    plain = codes.plain(speed.dtype).view(num_experts, num_rows, width)
                    experts.register_parameter(leaf, nn.Parameter(plain, requires_grad=False))
                else:
                    experts.add_module(leaf, CodedExperts(codes, num_experts))
            what = f"{name} in {form_name}"
            if not rehearse:
                fault = fault_of_experts(experts, speed.dtype, ours)
                yield {"what": what, "right": float(fault is None)}
            for steps in inputs:
                yield _timed(what, ours, experts, steps, speed)


def _calls(forward: ExpertsForward, experts: Any, steps: Sequence[Rows]) -> list[Callable[[], object]]:
    """One call a step: steps choose other experts, which are not in the device's cache."""
    return [partial(forward, experts, *rows) for rows in steps]


def _timed(
    what: str, forward: ExpertsForward, experts: Any, steps: Sequence[Rows], speed: DeviceSpeed
) -> dict[str, Any]:
    seconds = replayed_s(_calls(forward, experts, steps), speed.device)
    tensors = (*experts.parameters(), *experts.buffers())
    num_experts = sum(len(chosen.unique()) for _, chosen, _ in steps) / len(steps)
    num_bytes = num_experts * sum(each.nbytes for each in tensors) / experts.num_experts
    return {
        "what": f"{what}, {len(steps[0][0])} tokens", "us": 1e6 * seconds,
        "gb_per_s": num_bytes / 1e9 / seconds,
    }  # fmt: skip


def _rows(config: hf.Qwen3MoeConfig, num_tokens: int, speed: DeviceSpeed) -> Rows:
    """Rows, the experts that each has chosen, and weights."""
    num_chosen = min(_NUM_CHOSEN, config.num_experts)
    x = torch.randn(num_tokens, config.hidden_size, device=speed.device, dtype=speed.dtype)
    scores = torch.rand(num_tokens, config.num_experts, device=speed.device)
    weights, chosen = scores.topk(num_chosen)
    return x, chosen, weights.to(speed.dtype)
