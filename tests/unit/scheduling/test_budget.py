from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.budget import StepBudget, tokens_of_fixed_part, tokens_that_fit

TARGET_S = 0.1
FIXED_S, PER_TOKEN_S, PER_PAIR_S = 0.01, 1e-4, 2e-8


def device_s(tokens: int, context: float, slowness: float = 1) -> float:
    return slowness * (FIXED_S + PER_TOKEN_S * tokens + PER_PAIR_S * tokens * context)


class Machine:
    """A noisy device that runs `demand` tokens, as far as the budget allows them."""

    def __init__(self, budget: StepBudget, *, noise: float, hiccup_ratio: float = 0, seed: int = 0):
        self.budget = budget
        self.slowness = 1.0
        self.contexts = (0.0, 8000.0)
        self.demands: tuple[int, ...] = (10_000,)
        self._noise, self._hiccup_ratio = noise, hiccup_ratio
        self._rng = random.Random(seed)

    def run(self, num_steps: int) -> list[float]:
        """What steps that use the whole budget would last without noise, in seconds."""
        whole_s = []
        for _ in range(num_steps):
            context = self._rng.uniform(*self.contexts)
            allowed = self.budget.max_tokens(context)
            whole_s.append(device_s(allowed, context, self.slowness))
            tokens = min(allowed, self._rng.choice(self.demands))
            hiccup = 20 if self._rng.random() < self._hiccup_ratio else 1
            noise = self._rng.lognormvariate(0, self._noise)
            self.budget.observe(tokens, context, device_s(tokens, context, self.slowness) * hiccup * noise)
        return whole_s


def near_target(steps_s: list[float], low: float, high: float) -> float:
    return sum(low * TARGET_S <= step_s <= high * TARGET_S for step_s in steps_s) / len(steps_s)


def test_the_first_step_is_one_block_and_budgets_grow_from_there():
    budget = StepBudget(TARGET_S, 16, 8192)
    assert budget.max_tokens(0) == 16
    budget.observe(16, 0, device_s(16, 0))
    assert 16 <= budget.max_tokens(0) <= 32


def test_time_that_cannot_be_told_apart_is_put_down_to_the_tokens():
    budget = StepBudget(TARGET_S, 16, 8192)
    budget.observe(16, 0, 0.02)
    assert budget.predicted_s(32, 0) == pytest.approx(0.04)


def test_an_exact_machine_is_learnt_in_thirty_steps():
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0)
    machine.run(30)
    assert near_target(machine.run(50), 0.95, 1.05) == 1


@pytest.mark.parametrize("seed", range(5))
def test_steps_stay_near_the_target_on_a_noisy_machine_with_hiccups(seed: int):
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.1, hiccup_ratio=0.03, seed=seed)
    machine.run(60)
    assert near_target(machine.run(300), 0.75, 1.25) >= 0.95


@pytest.mark.parametrize("slowness", [0.25, 0.5, 2, 4])
def test_a_change_of_speed_is_followed_within_sixty_steps(slowness: float):
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.05)
    machine.run(100)
    machine.slowness = slowness
    machine.run(60)
    assert near_target(machine.run(100), 0.75, 1.25) >= 0.95


def test_a_change_of_speed_is_followed_though_half_of_the_steps_are_small():
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.05)
    machine.demands = (64, 5000)
    machine.run(100)
    machine.slowness = 3
    machine.run(100)
    assert near_target(machine.run(100), 0.75, 1.25) >= 0.95


def test_one_long_hiccup_hardly_moves_the_budget():
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.02)
    machine.run(100)
    before = machine.budget.max_tokens(1000)
    machine.budget.observe(before, 1000, 1000 * TARGET_S)
    assert machine.budget.max_tokens(1000) > 0.85 * before


def test_a_slow_first_step_is_forgotten():
    budget = StepBudget(TARGET_S, 16, 8192)
    budget.observe(16, 0, 5.0)
    machine = Machine(budget, noise=0.05)
    machine.run(30)
    assert near_target(machine.run(50), 0.75, 1.25) >= 0.9


def test_steps_that_are_all_alike_do_not_make_the_answer_run_away():
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.1)
    machine.run(100)
    machine.contexts = (2000.0, 2000.0)
    machine.run(1000)
    assert near_target(machine.run(20), 0.7, 1.3) == 1


def test_longer_contexts_get_fewer_tokens():
    machine = Machine(StepBudget(TARGET_S, 16, 8192), noise=0.02)
    machine.run(100)
    assert machine.budget.max_tokens(0) > machine.budget.max_tokens(8000)


def test_a_budget_without_a_meaning_is_refused():
    for arguments in ((0, 16, 64), (0.1, 0, 64), (0.1, 65, 64)):
        with pytest.raises(ValueError, match="not a step budget"):
            StepBudget(*arguments)


steps = st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e5), st.floats(0, 1e4)), max_size=30)


@given(steps, st.floats(0, 1e6))
def test_whatever_was_seen_the_budget_stays_between_its_limits(
    seen: list[tuple[int, float, float]], context: float
):
    budget = StepBudget(TARGET_S, 16, 512)
    for step in seen:
        budget.observe(*step)
        assert 16 <= budget.max_tokens(context) <= 512
        assert budget.predicted_s(256, context) >= 0
    assert 16 <= budget.max_tokens(context) <= 512


def steps_of_prompt(num_tokens: int, budget: StepBudget, limit_s: float) -> list[int]:
    """Tokens of each step, at a device whose steps last 59 ms and 3 us a token: an H100 that launches kernels
    from Python, 2026-11-26."""
    steps = []
    while num_tokens > 0:
        steps.append(min(num_tokens, budget.max_tokens(0.0, limit_s)))
        budget.observe(steps[-1], 0.0, 0.059 + 3e-6 * steps[-1])
        num_tokens -= steps[-1]
    return steps


def test_a_limit_below_the_fixed_part_of_a_step_makes_no_steps_of_one_block():
    budget = StepBudget(0.5, 16, 2048)
    for tokens in (16, 32, 64, 128, 256, 512, 1024):
        budget.observe(tokens, 0.0, 0.059 + 3e-6 * tokens)
    assert steps_of_prompt(1069, budget, limit_s=0.05) == [1069], "67 steps of 3.9 s, if each is one block"


def test_beside_answers_prompts_get_the_whole_pause_if_both_have_the_same_fixed_part():
    budget = StepBudget(0.5, 16, 8192)
    for tokens in (16, 64, 256, 1024) * 4:
        budget.observe(tokens, 0.0, device_s(tokens, 0))
    own_s = FIXED_S
    assert budget.max_tokens(0.0, 0.05 + own_s) == pytest.approx(0.05 / PER_TOKEN_S, rel=0.01)


@given(st.floats(1e-4, 1), st.floats(1e-7, 1e-2), st.floats(0, 1), st.integers(1, 10**6))
def test_a_limit_makes_a_prompt_at_most_twice_as_long(
    fixed_s: float, token_s: float, limit_s: float, num_tokens: int
):
    in_a_step = tokens_that_fit(limit_s, fixed_s, token_s, tokens_of_fixed_part(fixed_s, token_s))
    in_steps_s = num_tokens / in_a_step * fixed_s + num_tokens * token_s
    assert in_steps_s <= 2.001 * (fixed_s + num_tokens * token_s)
    assert fixed_s + in_a_step * token_s <= 1.001 * max(limit_s, 2 * fixed_s)
