"""What decode learns before the first request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.engine.warm_up import MANY_SEQUENCES, warm_up_answers, warm_up_prompts
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.fit import StepFit
from cluster.worker.cpu_slots import no_cpu_slots
from tests.fakes.clock import ManualClock


class SlowRunner:
    """A step takes 10 ms, 1 ms more per sequence, and a microsecond per token that it sees."""

    def __init__(self, clock: ManualClock, num_blocks: int, block_size: int):
        self._clock, self._num_blocks, self._block_size = clock, num_blocks, block_size
        self.sizes: set[int] = set()

    def warm_up_answers(self, num_sequences: int, context: int, table: list[int]) -> None:
        assert len(table) * self._block_size > context >= 0 and max(table) < self._num_blocks
        self.sizes.add(num_sequences)
        self._clock.at += 0.01 + num_sequences * (0.001 + 1e-6 * context)


@pytest.mark.parametrize(
    ("num_blocks", "max_sequences", "max_model_len"),
    [(64, 256, 4096), (2, 4, 4096), (64, 1, 4096), (64, 64, 100)],
)
def test_a_curve_is_there_and_every_block_is_free(num_blocks, max_sequences, max_model_len):
    clock, pool, fit = ManualClock(), BlockPool(num_blocks, 16), StepFit(max_sequences, 8192)
    runner = SlowRunner(clock, num_blocks, 16)
    warm_up_answers(runner, pool, fit, no_cpu_slots(clock), max_sequences, max_model_len)  # type: ignore[arg-type]
    assert runner.sizes == {1, min(MANY_SEQUENCES, max_sequences)}
    curve = fit.curve()
    assert curve is not None and curve.seconds(1, 16) == pytest.approx(0.011, rel=0.1)
    assert pool.num_free == num_blocks
    pool.check_integrity()


class SlowPrompts:
    """A step takes 1 ms per token, and the first of all a second more."""

    def __init__(self, clock: ManualClock):
        self._clock = clock
        self.sizes: list[int] = []
        self.room: int | None = None

    def room_for_prompts(self, answers: Sequence[object]) -> int | None:
        return self.room

    def warm_up_prompt(self, num_tokens: int, table: list[int]) -> None:
        assert len(table) * 16 >= num_tokens
        self._clock.at += 0.001 * num_tokens + (0 if self.sizes else 1)
        self.sizes.append(num_tokens)


def test_what_is_done_only_once_is_no_part_of_what_a_prompt_takes():
    clock, pool = ManualClock(), BlockPool(64, 16)
    runner, budget = SlowPrompts(clock), StepBudget(0.5, 64, 8192)
    warm_up_prompts(runner, pool, budget, no_cpu_slots(clock), 1024)  # type: ignore[arg-type]
    assert runner.sizes == [64, 64, 128, 256, 499]
    assert pool.num_free == 64


def test_prompts_are_warmed_up_to_what_a_recorded_step_holds():
    clock, pool = ManualClock(), BlockPool(64, 16)
    runner = SlowPrompts(clock)
    runner.room = 200
    warm_up_prompts(runner, pool, StepBudget(0.5, 64, 8192), no_cpu_slots(clock), 1024)  # type: ignore[arg-type]
    assert runner.sizes == [64, 64, 128]
