"""The kernels that draw tokens, in Triton's interpreter, against torch's draw. The interpreter has to be
asked for: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from cluster.model.cuda import draw as draw_module
from cluster.model.cuda.draw import GREEDY, RECORD, DrawTiles, draw_tokens
from cluster.model.sampling import draw, draw_records, keep_likely, sample
from cluster.types.request import SamplingParams
from tests.unit.model.test_sampling import key_of

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
INFINITY = float("inf")
WIDTH = 9001  # three tiles
SMALL = DrawTiles(tile=256, parts=64, slots=128, draw_slots=128)


def records_of(temperatures: list[float], keys: list[int]) -> np.ndarray:
    records = np.zeros(len(keys), dtype=RECORD)
    records["key"], records["temperature"] = keys, temperatures
    return records


def check(logits: torch.Tensor, temperatures: list[float], seed: int) -> None:
    records = draw_records(
        [SamplingParams(temperature=1.0, seed=seed)] * len(logits), range(len(logits)), WIDTH
    )
    records["temperature"] = temperatures
    wanted = draw(logits / torch.tensor(temperatures)[:, None], records["key"].tolist())
    assert torch.equal(draw_tokens(logits, records), wanted)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("width", [1, 70, 4096, WIDTH])
def test_the_kernels_draw_what_torch_draws(spread: float, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for seed in range(4):
        logits = spread * torch.randn(6, width, generator=generator) + (1e4 if seed == 3 else 0.0)
        logits[torch.rand(6, width, generator=generator) > (1.0, 0.5, 0.01, 1.0)[seed]] = -INFINITY
        check(logits, [0.3, 0.7, 1.0, 1.0, 1.5, 10.0], seed)


def test_many_rows_draw_what_torch_draws() -> None:
    """Flat and skewed rows of every temperature."""
    ids = torch.arange(4200, dtype=torch.float32)
    rows = [torch.zeros_like(ids), -ids * 0.01, (ids % 64 == 63) * 10.0, (ids == 4199) * 9.0]
    for seed in range(40):
        check(torch.stack(rows), [0.3 + 0.01 * seed, 0.7, 1.0, 1.3], seed)


def test_the_token_with_the_most_and_the_least_noise_that_there_is() -> None:
    for word, gap in [(2**64 - 1, 36.0), (2**64 - 1, 40.0), (0, -5.0), (2**63, 0.0)]:
        for token in (0, 200, 4096, 8999):
            logits = torch.zeros(1, WIDTH)
            logits[0, token] = -gap
            keys = [key_of(word, token)]
            assert torch.equal(draw_tokens(logits, records_of([1.0], keys)), draw(logits, keys))


@pytest.mark.parametrize("value", [float("nan"), INFINITY, -INFINITY, 3e38, -3e38])
def test_numbers_at_their_ends(value: float) -> None:
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    for places in ([0], [WIDTH - 1], [WIDTH // 2, WIDTH - 1], list(range(WIDTH))):
        logits = row.clone()
        logits[places] = value
        check(logits.expand(4, -1), [1.0, 0.1, 1e-42, 1e-60], 1)
        assert draw_tokens(logits[None], records_of([GREEDY], [5])).tolist() == [int(logits.argmax())]


def test_of_equal_scores_the_first_is_drawn() -> None:
    logits = torch.full((1, WIDTH), 1e30)  # noise is lost in rounding
    logits[0, :5000] = 0
    assert draw_tokens(logits, records_of([1.0], [5])).tolist() == [5000]
    assert draw_tokens(torch.zeros(1, WIDTH), records_of([GREEDY], [5])).tolist() == [0]


def test_rows_of_a_step_are_drawn_where_they_lie() -> None:
    """Greedy rows, plain ones and filtered ones side by side, in a matrix with gaps."""
    wide = 3 * torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_k=50, seed=2),
        SamplingParams(temperature=1.0, top_p=0.7, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4),
        SamplingParams(temperature=1.0, seed=5),
    ]
    logits = wide[:, 1]
    assert draw_tokens(logits, draw_records(params, range(6), WIDTH)).tolist() == sample(
        logits, params, range(6)
    )


def places_of(scores: torch.Tensor) -> torch.Tensor:
    """See `filter_kernels`."""
    bits = (scores + 0.0).view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 24) | torch.arange(scores.shape[-1])


def is_close_call(scores: torch.Tensor, p: SamplingParams, token: int) -> bool:
    """Whether a filter's decision about the token is within 1e-5, in float64. scores: [V], after top-k."""
    probs = scores.double().softmax(-1)
    tail = probs[places_of(scores) <= places_of(scores)[token]].sum()
    of_most = probs[token] / probs.max()
    by_top_p = p.top_p < 1 and abs(float(tail) - (1 - p.top_p)) < 1e-5
    return by_top_p or (p.min_p > 0 and abs(float(of_most) / p.min_p - 1) < 1e-5)


def check_kept(
    logits: torch.Tensor, params: Sequence[SamplingParams], tiles: DrawTiles = SMALL
) -> torch.Tensor:
    """[B, V] bool: the kept tokens, which are torch's. The drawn one is torch's draw of the same tokens."""
    temperatures = torch.tensor([p.temperature for p in params])[:, None]
    scores, records = logits / temperatures, draw_records(params, range(len(params)), logits.shape[-1])
    boundaries = torch.zeros(len(params), dtype=torch.int64)
    drawn = draw_tokens(logits, records, boundaries, tiles)
    kept = places_of(scores) >= boundaries[:, None]
    wanted = keep_likely(scores, params) > -INFINITY
    for row, p in enumerate(params):
        for token in (kept[row] & (scores[row] > -INFINITY)).ne(wanted[row]).nonzero().flatten().tolist():
            only_k = keep_likely(scores[row : row + 1], [SamplingParams(1.0, top_k=p.top_k)])[0]
            assert is_close_call(only_k, p, token), (p, token)
    assert torch.equal(drawn, draw(scores.masked_fill(~kept, -INFINITY), records["key"].tolist()))
    return kept


FILTERS = [
    SamplingParams(temperature=0.8, top_k=20, top_p=0.8, seed=1),
    SamplingParams(temperature=1.3, top_p=0.95, min_p=0.01, seed=2),
    SamplingParams(temperature=1.0, top_k=60, min_p=0.1, seed=3),
    SamplingParams(temperature=1.0, top_k=1, seed=4),
    SamplingParams(temperature=1.0, top_k=650, top_p=0.99999, seed=5),
    SamplingParams(temperature=0.5, top_p=1e-9, seed=6),
    SamplingParams(temperature=1.0, top_p=0.0, min_p=1.0, seed=7),
    SamplingParams(temperature=1.0, min_p=1.0, seed=8),
    SamplingParams(temperature=2.0, min_p=1e-6, seed=9),
    SamplingParams(temperature=1.0, top_p=0.5, seed=10),
]


@pytest.mark.parametrize("shape", ["random", "ties", "rare", "flat", "one peak", "two values", "far"])
def test_the_kernels_keep_what_torch_keeps(shape: str) -> None:
    width, count = 700, len(FILTERS)
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(len(shape)))
    logits = {
        "random": 3 * noise,
        "ties": (3 * noise).round(),
        "rare": torch.where(noise > 1.5, noise, -INFINITY),
        "flat": torch.zeros(count, width),
        "one peak": torch.zeros(count, width).index_fill_(1, torch.tensor([600]), 30.0),
        "two values": torch.where(noise > 1, 1.0, -0.0),
        "far": 1e4 + 30 * noise,
    }[shape]
    check_kept(logits, FILTERS)


TOP_P = [
    SamplingParams(temperature=temperature, top_p=top_p, seed=11)
    for temperature, top_p in [(0.6, 0.95), (0.8, 0.5), (0.8, 0.95), (1.0, 0.8), (1.5, 0.99)]
]


@pytest.mark.parametrize(
    ("shape", "most"), [("normal", 12), ("bfloat16", 30), ("peaks", 12), ("wide", 4), ("far", 20)]
)
def test_top_p_alone_looks_at_few_tokens_a_few_times(shape: str, most: int, monkeypatch) -> None:
    """All passes together at no more than `most` tokens for each that is kept."""
    from cluster.model.cuda import filter_kernels

    count_from, seen = filter_kernels.count_from, []

    def counting(listed: Any, counts: Any, *args: Any) -> Any:
        seen.append(int(counts.handle.data.sum()))
        return count_from(listed, counts, *args)

    monkeypatch.setattr(filter_kernels, "count_from", counting)
    noise = torch.randn(len(TOP_P), 6000, generator=torch.Generator().manual_seed(9))
    logits = {
        "normal": 3 * noise,
        "bfloat16": (3 * noise + 15).bfloat16().float(),  # many are equal
        "peaks": 2 * noise + (torch.arange(6000) % 2999 == 77) * 12.0,
        "wide": 40 * noise,
        "far": 1e5 + 8 * noise,
    }[shape]
    kept = check_kept(logits, TOP_P, DrawTiles(tile=2048, slots=2048, draw_slots=2048))
    assert 0 < sum(seen) <= most * int(kept.sum())


def test_a_filtered_row_with_numbers_at_their_ends_takes_what_torch_takes() -> None:
    row = torch.randn(700, generator=torch.Generator().manual_seed(1))
    params = [*FILTERS[:4], FILTERS[7]]
    for value in (float("nan"), INFINITY, -INFINITY):
        for places in ([7, 699], range(700)):
            logits = row.repeat(5, 1).index_fill_(1, torch.tensor(places), value)
            records = draw_records(params, range(5), 700)
            assert draw_tokens(logits, records, tiles=SMALL).tolist() == sample(logits, params, range(5))


def test_few_tokens_are_filtered() -> None:
    """Fewer than top-k asks for, and fewer than the parts of a tile."""
    for width in (1, 3, 70):
        check_kept(torch.randn(len(FILTERS), width, generator=torch.Generator().manual_seed(width)), FILTERS)


def test_many_filtered_rows_share_their_scratch(monkeypatch) -> None:
    monkeypatch.setattr(draw_module, "MAX_LISTED", 5 * 512)  # rows of two tiles: groups of four
    check_kept(3 * torch.randn(10, 300, generator=torch.Generator().manual_seed(2)), FILTERS)
