"""Gives experts our two launches (`expert_products`) in place of transformers' grouped products.

transformers calls the experts of any family by the name of a function in its configuration. Ours are
registered there under two names: for all steps, and for steps of few tokens alone. Experts that keep one of
them get a copy of their configuration with its name.

Each experts module is run over the same random rows before and after, without the collectives of several
ranks. It keeps our function only if both agree, and ours takes less time. Modules of one form share a
measurement. What stays is named in the log.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from cluster.config.machine import has_triton
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.layers.codes import CodedExperts, ExpertsForward
from cluster.model.layers.trial import ENCODER_TOLERANCES, agree, median_s

logger = logging.getLogger(__name__)

ALWAYS, FEW = "epdg_experts", "epdg_experts_of_few_tokens"
FEW_TOKENS = 64  # of the second; a step of answers has no more as a rule
_TRIALS = (16, 512)  # tokens of the measurements
_NUM_CHOSEN, _NUM_ROUNDS = 2, 5


def optimise_experts(
    text: nn.Module, forward: ExpertsForward | None = None, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Gives each experts module in `text` that calls a function by its name the one that serves it
    best; returns how many got ours. Those that compute from their codes have it already (`coded_choice`).
    Call it in evaluation mode, with the weights on the device that computes. forward: in place of
    `experts_forward`, which is the default where triton can be used."""
    found = [part for part in text.modules() if hasattr(part, "has_post_expert_norm") and not _is_coded(part)]
    if not found:
        return 0
    if forward is None and not has_triton():
        logger.warning("experts: transformers' grouped products, as triton cannot be used")
        return 0
    ours = forward or experts_forward
    ExpertsInterface.register(ALWAYS, ours)
    ExpertsInterface.register(FEW, partial(_of_few, ours))
    names: dict[object, str | None] = {}
    results = Counter()
    with torch.inference_mode():
        for part in found:
            results[type(part).__name__, _replace(part, ours, names, clock)] += 1
    for (name, result), count in results.items():
        logger.info("experts: %d %s: %s", count, name, result)
    return sum(count for (_, result), count in results.items() if result in (ALWAYS, FEW))


def _is_coded(experts: nn.Module) -> bool:
    return any(isinstance(child, CodedExperts) for child in experts.children())


def _of_few(ours: ExpertsForward, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    forward = ours if len(x) <= FEW_TOKENS else grouped_mm_experts_forward
    return forward(experts, x, chosen, weights)


def _replace(
    experts: nn.Module, ours: ExpertsForward, names: dict[object, str | None], clock: Callable[[], float]
) -> str:
    """The name of the function that the experts got, or why they keep transformers'."""
    own: Any = experts
    with local_parameters(experts):
        down: Tensor = own.down_proj
        if own.has_post_expert_norm:
            return "a norm follows each expert"
        if (name := own.config._experts_implementation) != "grouped_mm":
            return f"transformers calls them by '{name}'"
        if down.dtype not in ENCODER_TOLERANCES:
            return f"they compute in {down.dtype}"
        form = (type(experts), *((name, tuple(each.shape)) for name, each in experts.named_parameters()))
        try:
            if not all(_agrees(experts, ours, num_tokens) for num_tokens in _TRIALS):
                return "our launches give other numbers"
            if form not in names:
                names[form] = _fastest(experts, ours, clock)
        except Exception as error:  # of a family or a compiler: it is not replaced, and the log says why
            if down.device.type == "cuda":
                torch.cuda.synchronize(down.device)  # raises if the device itself is broken
            return f"{type(error).__name__}: {error}"
    if (name := names[form]) is None:
        return "transformers' grouped products are faster"
    own.config = copy.copy(own.config)
    own.config._experts_implementation = name
    return name


def _agrees(experts: nn.Module, ours: ExpertsForward, num_tokens: int) -> bool:
    rows = _random_rows(experts, num_tokens)
    expected = grouped_mm_experts_forward(experts, *rows)
    return agree(ours(experts, *rows), expected, ENCODER_TOLERANCES[expected.dtype])


def _fastest(experts: nn.Module, ours: ExpertsForward, clock: Callable[[], float]) -> str | None:
    is_faster = []
    for num_tokens in _TRIALS:
        rows = _random_rows(experts, num_tokens)
        own_s, their_s = (
            median_s(partial(forward, experts, *rows), rows[0].device, _NUM_ROUNDS, clock)
            for forward in (ours, grouped_mm_experts_forward)
        )
        is_faster.append(own_s < their_s)
    few, many = is_faster
    return (ALWAYS if many else FEW) if few else None


def _random_rows(experts: nn.Module, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts that they choose (some of other ranks, if there are), and weights."""
    own: Any = experts
    down, generator = own.down_proj, torch.Generator().manual_seed(0)
    num_experts, width = len(down), down.shape[2 if own.is_transposed else 1]
    num_chosen = min(_NUM_CHOSEN, num_experts)
    x = torch.randn(num_tokens, width, generator=generator).to(down.device, down.dtype)
    scores = torch.rand(num_tokens, num_experts + own._is_expert_parallel, generator=generator)
    chosen = scores.topk(num_chosen).indices.to(down.device)
    weights = torch.rand(num_tokens, num_chosen, generator=generator).to(down.device, down.dtype)
    return x, chosen, weights.masked_fill(chosen == num_experts, 0.0)


@contextmanager
def local_parameters(experts: nn.Module) -> Iterator[None]:
    """This rank's share of the parameters in place of what stands for all of them."""
    whole = {name: each for name, each in experts._parameters.items() if isinstance(each, DTensor)}
    experts._parameters.update({name: nn.Parameter(each.to_local(), False) for name, each in whole.items()})
    try:
        yield
    finally:
        experts._parameters.update(whole)
