"""Drawn tokens follow the exact distribution, and depend on nothing but logits, parameters, seed and
position."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

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

from cluster.model.cpu.library import load_variant
from cluster.model.sampling import (
    GAMMA,
    MIX_1,
    MIX_2,
    _ascending,
    _mix,
    _row_key,
    _signed,
    draw,
    draw_native,
    draw_records,
    gumbel_noise,
    keep_likely,
    sample,
)
from cluster.native.variants import runnable_variants
from cluster.types.request import SamplingParams

VOCAB = 7
LOGITS = torch.tensor([1.5, 0.2, -1.0, 0.9, -0.3, 2.0, 0.0])
# 99.9 % quantile by degrees of freedom
CHI_SQUARE_999 = {
    1: 10.83,
    2: 13.82,
    3: 16.27,
    4: 18.47,
    5: 20.52,
    6: 22.46,
}

LOADED = {v.name: kernels.cdll for v in runnable_variants() if (kernels := load_variant(v))}
each_variant = pytest.mark.parametrize(
    "native",
    [pytest.param(cdll, id=name) for name, cdll in LOADED.items()]
    or [pytest.param(None, marks=pytest.mark.skip("no native kernels for this CPU, or no compiler"))],
)
INFINITY = float("inf")


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' own chain, in its own order."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    no_ids: Any = None
    return chain(no_ids, logits)


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


@settings(max_examples=150)
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


@settings(max_examples=50)
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


@settings(max_examples=100)
@given(
    width=st.integers(1, 300),
    scores=st.lists(
        st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0]),
        min_size=1,
        max_size=20,
    ),
    seed=st.integers(0, 2**31),
)
def test_scores_sort_as_torch_sorts_them(width: int, scores: list[float], seed: int) -> None:
    """Ties, either zero, subnormals and infinities included."""
    places = torch.randint(len(scores), (2, width), generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor(scores)[places]
    values, order = rows.sort(dim=-1, stable=True)
    ours = _ascending(rows)
    assert torch.equal(ours[0], values)
    assert torch.equal(ours[1], order)


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


def test_of_equal_logits_a_greedy_row_takes_the_first_also_where_numbers_end() -> None:
    logits = torch.zeros(5, 70)
    logits[1, [40, 66]] = 2.0
    logits[2] = -torch.inf
    logits[3, [3, 9]] = torch.inf
    logits[4, 8] = torch.nan
    every_second = torch.zeros(5, 140)[:, ::2].copy_(logits)
    for rows in (logits, every_second):
        assert sample(rows, [SamplingParams()] * 5, [0] * 5) == [0, 40, 0, 3, 8]


@pytest.mark.slow  # tests/serve compares two clusters
def test_another_process_draws_the_same_tokens() -> None:
    code = (
        "import torch; from cluster.model.sampling import sample; from cluster.types.request import SamplingParams as S;"
        "torch.rand(3); print(sample(torch.linspace(0, 1, 64).expand(16, 64), [S(temperature=1.0, seed=42)] * 16, range(16)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    here = sample(
        torch.linspace(0, 1, 64).expand(16, 64), [SamplingParams(temperature=1.0, seed=42)] * 16, range(16)
    )
    assert there == f"{here}\n"


def test_the_mixer_is_splitmix64() -> None:
    """First outputs of the reference generator for seed 1234567 (Vigna's splitmix64.c)."""
    state, gamma = 1234567, 0x9E3779B97F4A7C15
    outputs = [_mix(state + gamma * i) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def key_of(word: int, token: int) -> int:
    """The row key with which a token's random word is `word`: `_mix` backwards."""
    word ^= word >> 31 ^ word >> 62
    word = word * pow(MIX_2, -1, 2**64) % 2**64
    word ^= word >> 27 ^ word >> 54
    word = word * pow(MIX_1, -1, 2**64) % 2**64
    word ^= word >> 30 ^ word >> 60
    return _signed(word - (token + 1) * GAMMA)


def test_noise_is_finite_for_every_key() -> None:
    noise = gumbel_noise(torch.tensor([0, -1, 2**63 - 1, -(2**63), key_of(0, 0), key_of(2**64 - 1, 0)]), 1000)
    assert torch.isfinite(noise).all()
    assert noise[4, 0] == pytest.approx(-3.6225, abs=1e-4)  # -log(54 log 2)
    assert noise[5, 0] == pytest.approx(36.7368, abs=1e-4)  # 53 log 2
    assert abs(float(noise[:4].mean()) - 0.5772) < 0.1  # Euler's constant


# ------------------------------------------------------------------------------------------------- native
# against torch


def assert_same_draws(
    native: ctypes.CDLL, logits: torch.Tensor, temperatures: list[float], seed: int
) -> None:
    keys = [_signed(_mix(seed + i)) for i in range(len(logits))]
    expected = draw(logits / torch.tensor(temperatures)[:, None], keys)
    assert torch.equal(draw_native(native, logits, range(len(logits)), temperatures, keys), expected)


@each_variant
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**40),
    width=st.one_of(st.integers(1, 70), st.integers(100, 3000)),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e4, 1e30]),
    offset=st.sampled_from([0.0, 1e4, -1e4, 1e16, -1e30]),
    kept=st.sampled_from([1.0, 0.5, 0.01]),
    temperature=st.floats(0.01, 10),
)
def test_native_draws_what_torch_draws(
    native: ctypes.CDLL, seed: int, width: int, spread: float, offset: float, kept: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, width, generator=generator) * spread + offset
    logits[torch.rand(4, width, generator=generator) > kept] = -INFINITY
    assert_same_draws(native, logits, [temperature, 1.0, 2 * temperature, 0.5], seed)


@each_variant
@pytest.mark.parametrize("shape", ["flat", "rising", "falling", "steps", "one peak"])
def test_native_draws_what_torch_draws_from_whole_vocabularies(native: ctypes.CDLL, shape: str) -> None:
    ids = torch.arange(32_003, dtype=torch.float32)
    logits = {
        "flat": torch.zeros_like(ids),
        "rising": ids * 1e-3,
        "falling": -ids * 0.1,
        "steps": (ids % 64 == 63) * 10.0,
        "one peak": (ids == 32_002) * 12.0,
    }[shape]
    for seed in range(0, 60, 6):
        assert_same_draws(native, logits.expand(6, -1), [0.3, 0.7, 1.0, 1.0, 1.5, 3.0], seed)


@each_variant
def test_native_draws_the_token_with_the_most_and_the_least_noise_that_there_is(native: ctypes.CDLL) -> None:
    for word, gap in [(2**64 - 1, 36.0), (2**64 - 1, 40.0), (0, -5.0), (2**63, 0.0)]:
        for token in (0, 5, 64, 200):
            logits = torch.zeros(1, 201)
            logits[0, token] = -gap
            keys = [key_of(word, token)]
            assert torch.equal(draw_native(native, logits, [0], [1.0], keys), draw(logits, keys))
    assert draw_native(native, torch.zeros(1, 1), [0], [1.0], [key_of(0, 0)]).tolist() == [0]


@each_variant
@pytest.mark.parametrize("width", [1, 9, 64, 203])
def test_native_draws_what_torch_draws_where_numbers_end(native: ctypes.CDLL, width: int) -> None:
    row = torch.randn(width, generator=torch.Generator().manual_seed(width))
    for value in (float("nan"), INFINITY, -INFINITY, 3e38, -3e38):
        for places in ([0], [width - 1], [width // 2, width - 1], list(range(width))):
            logits = row.clone()
            logits[places] = value
            assert_same_draws(native, logits.expand(4, -1), [1.0, 0.1, 1e-42, 1e-60], 1)


@each_variant
def test_of_equal_sums_native_draws_the_first(native: ctypes.CDLL) -> None:
    logits = torch.full((1, 500), 1e30)  # noise is lost in rounding
    logits[0, :77] = 0
    assert draw_native(native, logits, [0], [1.0], [5]).tolist() == [77]


@each_variant
def test_rows_are_drawn_in_place_with_any_number_of_threads(native: ctypes.CDLL) -> None:
    wide = torch.randn(12, 2, 20_000, generator=torch.Generator().manual_seed(3))
    logits, rows, keys = wide[:, 1], [11, 3, 4, 5, 6, 7, 8, 3], list(range(8))
    expected = draw(logits[rows], keys)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(draw_native(native, logits, rows, [1.0] * 8, keys), expected)
            transposed = logits.t().contiguous().t()
            assert torch.equal(draw_native(native, transposed, rows, [1.0] * 8, keys), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1e-30, 1e-4])
def test_the_most_probable_token_stays_however_small_top_p_is(top_p: float) -> None:
    """1 - top_p rounds to 1 in float32, and so does the sum of all probabilities."""
    logits = torch.stack([LOGITS, LOGITS.flip(0), torch.zeros(VOCAB)])
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=7)
    kept = keep_likely(logits, [params] * 3)
    assert torch.isfinite(kept).sum(dim=-1).tolist() == [1, 1, 1]
    assert kept[:2].argmax(dim=-1).equal(logits[:2].argmax(dim=-1))
    assert sample(logits[:2], [params] * 2, [4, 5]) == logits[:2].argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=2**63 - 1, seed=2**63),
        SamplingParams(temperature=1.0, top_k=2**80, seed=-(2**80)),
        SamplingParams(temperature=1e300, seed=2**64 - 1),
        SamplingParams(temperature=1e-300, top_p=0.5, min_p=1.0),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=float("inf"), top_k=3, min_p=0.5),
        SamplingParams(temperature=1.0, top_k=-(2**63), top_p=float("nan")),
    ],
    ids=str,
)
@pytest.mark.parametrize("position", [0, 2**31, 2**62])
def test_no_parameter_that_a_request_can_carry_makes_sampling_raise(
    params: SamplingParams, position: int
) -> None:
    """Nor does it change what the other rows draw."""
    plain = SamplingParams(temperature=1.0, seed=3)
    logits = torch.stack([LOGITS, LOGITS])
    odd, other = sample(logits, [params, plain], [position, 9])
    assert 0 <= odd < VOCAB
    assert other == sample(LOGITS[None], [plain], [9])[0]


def test_records_of_a_gpus_draws_hold_any_parameter() -> None:
    asked = [
        SamplingParams(),
        SamplingParams(1e300, 0.9, 2**80, 0.1, -(2**80)),
        SamplingParams(1.0, float("nan"), 3, 0.0, 5),
        SamplingParams(0.5, 1.0, -(2**63), float("nan"), 2**64 - 1),
    ]
    records = draw_records(asked, [0, 7, 2**31, 2**62], VOCAB)
    positions = (0, 7, 2**31, 2**62)
    assert records["key"].tolist() == [_row_key(p.seed, at) for p, at in zip(asked, positions, strict=True)]
    assert records["temperature"].tolist() == [-1.0, INFINITY, 1.0, 0.5]
    assert records["top_k"].tolist() == [0, 0, 3, 0]
    assert records["limit"].tolist() == pytest.approx([0.0, 0.1, 0.0, 0.0])
    assert records["min_p"].tolist() == pytest.approx([0.0, 0.1, 0.0, 0.0])
