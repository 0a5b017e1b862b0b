"""Drawn tokens follow the exact distribution, and depend on nothing but logits, parameters, seed and position."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cluster.model.sampling import _mix, gumbel_noise, keep_likely, sample
from cluster.types.request import SamplingParams

VOCAB = 7
LOGITS = torch.tensor([1.5, 0.2, -1.0, 0.9, -0.3, 2.0, 0.0])
CHI_SQUARE_999 = {
    1: 10.83,
    2: 13.82,
    3: 16.27,
    4: 18.47,
    5: 20.52,
    6: 22.46,
}  # 99.9 % quantile by degrees of freedom


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' own chain, in its own order."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(None, logits)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    kept = probs > 0
    expected = probs[kept] * counts.sum()
    assert counts[~kept].sum() == 0
    return float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("counter", ["position", "seed"])
def test_drawn_tokens_follow_the_exact_distribution(params: SamplingParams, counter: str) -> None:
    count = 20_000
    by_seed = counter == "seed"
    rows = [
        SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, i if by_seed else 7)
        for i in range(count)
    ]
    positions = [3] * count if by_seed else list(range(count))
    drawn = torch.tensor(sample(LOGITS.expand(count, VOCAB), rows, positions))
    probs = warped(LOGITS[None], params).softmax(-1)[0].double()
    statistic, freedom = chi_square(drawn.bincount(minlength=VOCAB).double(), probs)
    assert statistic < CHI_SQUARE_999[freedom]


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    count = 20_000
    flat = torch.zeros(count, 2)
    hot = SamplingParams(temperature=1.0, seed=1)
    here = torch.tensor(sample(flat, [hot] * count, range(count)))
    for other in (
        here.roll(1),
        torch.tensor(sample(flat, [SamplingParams(temperature=1.0, seed=2)] * count, range(count))),
    ):
        pairs = (2 * here + other).bincount(minlength=4).double()
        statistic, _ = chi_square(pairs, torch.full((4,), 0.25, dtype=torch.double))
        assert statistic < CHI_SQUARE_999[3]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = keep_likely(logits / temperature, [params, SamplingParams(temperature=temperature)])
    assert torch.equal(ours[:1], warped(logits[:1], params))
    assert torch.isfinite(ours[1]).all()


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 8))
def test_a_token_does_not_depend_on_its_batch(order: list[int], size: int) -> None:
    logits = torch.randn(8, 301, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(), SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.7, top_k=9, seed=5),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2**64 - 1), SamplingParams(temperature=2.0, min_p=0.1, seed=1),
        SamplingParams(temperature=1.5, seed=-3), SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, seed=9),
    ]  # fmt: skip
    positions = [11, 12, 13, 14, 15, 16, 17, 18]
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(8)]
    rows = order[:size]
    together = sample(logits[rows], [params[i] for i in rows], [positions[i] for i in rows])
    assert together == [alone[i] for i in rows]


def test_greedy_rows_take_the_largest_logit_and_leave_the_logits_alone() -> None:
    logits = torch.randn(4, 33)
    before = logits.clone()
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.1),
    ]
    drawn = sample(logits, params, [0, 0, 0, 0])
    assert [drawn[i] for i in (0, 2, 3)] == [int(logits[i].argmax()) for i in (0, 2, 3)]
    assert torch.equal(logits, before)


def test_another_process_draws_the_same_tokens() -> None:
    code = (
        "import torch; from cluster.model.sampling import sample; from cluster.types.request import SamplingParams as S;"
        "torch.rand(3); print(sample(torch.linspace(0, 1, 64).expand(16, 64), [S(temperature=1.0, seed=42)] * 16, range(16)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
        ).stdout
        for _ in range(2)
    }
    here = sample(
        torch.linspace(0, 1, 64).expand(16, 64), [SamplingParams(temperature=1.0, seed=42)] * 16, range(16)
    )
    assert outputs == {f"{here}\n"}


def test_the_mixer_is_splitmix64() -> None:
    """First outputs of the reference generator for seed 1234567 (Vigna's splitmix64.c)."""
    state, gamma = 1234567, 0x9E3779B97F4A7C15
    outputs = [_mix(state + gamma * i) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_finite_for_every_key() -> None:
    noise = gumbel_noise(torch.tensor([0, -1, 2**63 - 1, -(2**63)]), 1000)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.1  # Euler's constant
