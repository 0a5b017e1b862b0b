from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.scheduling.fit import StepFit
from cluster.types.curves import Curve

DEVICE = Curve(0.01, 3e-4, 1e-8)


def observe(fit: StepFit, rng: random.Random, units: int, context: float, noise: float = 0.0) -> None:
    fit.observe(units, context, DEVICE.seconds(units, context) * rng.lognormvariate(0, noise))


def test_there_is_no_curve_before_the_first_observation():
    fit = StepFit(256, 8192)
    assert fit.curve() is None
    fit.observe(1, 0, 0.01)
    assert fit.curve() is not None


def test_the_curve_predicts_what_the_fit_does_in_units_of_one():
    fit, rng = StepFit(256, 8192), random.Random(0)
    for units, context in ((1, 16), (16, 16), (1, 512), (16, 512)) * 10:
        observe(fit, rng, units, context)
    curve = fit.curve() or pytest.fail("nothing was learnt")
    assert curve.seconds(40, 3000) == pytest.approx(fit.predicted_s(40, 3000))
    assert curve.seconds(16, 300) == pytest.approx(DEVICE.seconds(16, 300), rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_hundreds_of_small_steps_leave_what_is_known_of_large_ones(seed: int):
    fit, rng = StepFit(256, 8192), random.Random(seed)
    for units, context in ((1, 16), (16, 16), (1, 512), (16, 512)):
        observe(fit, rng, units, context, noise=0.1)
    for context in range(400):
        observe(fit, rng, 1, context, noise=0.1)
    assert fit.predicted_s(64, 500) == pytest.approx(DEVICE.seconds(64, 500), rel=0.4)


def test_news_is_a_step_like_those_of_late_that_lasts_otherwise_than_was_told():
    fit, rng = StepFit(256, 8192), random.Random(1)
    assert not fit.has_deviated(None, 0.1)
    for _ in range(50):
        observe(fit, rng, 4, 100)
    assert fit.has_deviated(None, 0.1)
    told = fit.curve()
    assert not fit.has_deviated(told, 0.1)
    usual_s = DEVICE.seconds(4, 100)
    for _ in range(50):
        fit.observe(4, 100, 1.05 * usual_s)
    assert not fit.has_deviated(told, 0.1)
    for _ in range(50):
        fit.observe(4, 100, 1.2 * usual_s)
    assert fit.has_deviated(told, 0.1) and not fit.has_deviated(fit.curve(), 0.1)


steps = st.lists(st.tuples(st.integers(0, 512), st.floats(0, 1e5), st.floats(0, 1e4)), max_size=60)


@given(steps)
@example([(1, 0.0, 0.0), (1, 4e-83, 1.0)])
def test_whatever_was_seen_no_part_is_negative_or_endless(seen: list[tuple[int, float, float]]):
    fit = StepFit(512, 8192)
    for step in seen:
        fit.observe(*step)
        curve = fit.curve() or pytest.fail("nothing was learnt")
        assert all(0 <= part < 1e12 for part in msgspec.structs.astuple(curve))
