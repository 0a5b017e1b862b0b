"""The kernels that draw tokens, in Triton's interpreter, against torch's draw. The interpreter has to be
asked for: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from cluster.model.cuda.draw import GREEDY, draw_tokens
from cluster.model.sampling import _row_key, _sample_by_kernels, draw, sample
from cluster.types.request import SamplingParams
from tests.unit.model.test_sampling import key_of

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
INFINITY = float("inf")
WIDTH = 9001  # three tiles


def check(logits: torch.Tensor, temperatures: list[float], seed: int) -> None:
    keys = [_row_key(seed, row) for row in range(len(logits))]
    wanted = draw(logits / torch.tensor(temperatures)[:, None], keys)
    assert torch.equal(draw_tokens(logits, range(len(logits)), temperatures, keys), wanted)


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
            assert torch.equal(draw_tokens(logits, [0], [1.0], keys), draw(logits, keys))


@pytest.mark.parametrize("value", [float("nan"), INFINITY, -INFINITY, 3e38, -3e38])
def test_numbers_at_their_ends(value: float) -> None:
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    for places in ([0], [WIDTH - 1], [WIDTH // 2, WIDTH - 1], list(range(WIDTH))):
        logits = row.clone()
        logits[places] = value
        check(logits.expand(4, -1), [1.0, 0.1, 1e-42, 1e-60], 1)
        assert draw_tokens(logits[None], [0], [GREEDY], [5]).tolist() == [int(logits.argmax())]


def test_of_equal_scores_the_first_is_drawn() -> None:
    logits = torch.full((1, WIDTH), 1e30)  # noise is lost in rounding
    logits[0, :5000] = 0
    assert draw_tokens(logits, [0], [1.0], [5]).tolist() == [5000]
    assert draw_tokens(torch.zeros(1, WIDTH), [0], [GREEDY], [5]).tolist() == [0]


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
    assert _sample_by_kernels(logits, params, range(6)).tolist() == sample(logits, params, range(6))
