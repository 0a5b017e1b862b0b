"""Corrections and intervals learnt from what happened."""

import math
import random

import pytest

from cluster.types.members import Role
from cluster.types.timings import EncodeTiming, PrefillTiming
from router.policy import JointPolicy
from router.policy.calibration import (
    ACCURACY_WINDOW,
    FACTOR_WINDOW,
    MAX_FACTOR,
    NUM_ASSUMED,
    Calibration,
    ConformalInterval,
    Factor,
    Kind,
)
from tests.fakes.placement import cluster_of, media, text


def test_a_factor_finds_the_ratio_whatever_the_noise():
    rng, factor = random.Random(1), Factor()
    for _ in range(400):
        factor.observe(2.0 * rng.lognormvariate(0, 0.2), 1.0)
    assert factor.value == pytest.approx(2.0, rel=0.1)


def test_a_factor_is_what_half_of_the_observations_exceed_however_long_the_others_take():
    rng, factor = random.Random(1), Factor()
    for _ in range(400):
        factor.observe(1.2 if rng.random() < 0.7 else rng.uniform(2.0, 50.0), 1.0)
    assert factor.value == 1.2


def test_a_few_hiccups_do_not_move_a_factor_and_nothing_moves_it_out_of_bounds():
    factor = Factor()
    for _ in range(NUM_ASSUMED - 1):
        factor.observe(1000.0, 1.0)
    assert factor.value == 1.0
    for _ in range(FACTOR_WINDOW):
        factor.observe(1000.0, 1.0)
    assert factor.value == MAX_FACTOR
    for _ in range(FACTOR_WINDOW):
        factor.observe(0.001, 1.0)
    assert factor.value == 1 / MAX_FACTOR


def test_what_took_no_time_says_nothing():
    factor = Factor()
    factor.observe(0.0, 1.0)
    factor.observe(1.0, 0.0)
    assert factor.value == 1.0


@pytest.mark.parametrize("spread", [0.02, 0.2, 1.0])
def test_nine_in_ten_times_to_first_token_lie_in_their_interval_however_they_spread(spread):
    rng, interval, hits = random.Random(2), ConformalInterval(), []
    for idx in range(3000):
        low, high = interval.bounds()
        ratio = rng.lognormvariate(0.1, spread)
        if idx == 1500:
            spread *= 2  # the cluster changes
        hits.append(low <= ratio <= high)
        interval.observe(ratio, hits[-1])
    assert sum(hits[100:]) / len(hits[100:]) == pytest.approx(0.9, abs=0.02)


def test_before_anything_was_seen_the_interval_is_as_wide_as_a_correction_can_be():
    assert ConformalInterval().bounds() == (1 / MAX_FACTOR, MAX_FACTOR)


def test_statistics_are_of_the_last_predictions():
    calibration = Calibration()
    assert math.isnan(calibration.accuracy.mape)
    calibration.observe_ttft(Kind.TEXT, 2.0, 1.0, 1.0, (0.9, 1.1))
    assert (calibration.accuracy.mape, calibration.accuracy.coverage) == (0.5, 0.0)
    for _ in range(ACCURACY_WINDOW):
        calibration.observe_ttft(Kind.TEXT, 1.0, 1.1, 1.0, (0.9, 1.1))
    statistics = calibration.accuracy
    assert statistics.mape == pytest.approx(0.1)
    assert (statistics.coverage, statistics.num_observed) == (1.0, ACCURACY_WINDOW + 1)


def serve(cluster, request, now, ttft_s, *timings) -> None:
    """From the decision to the end, with nobody beside it."""
    decision = JointPolicy().decide(request, cluster, now)
    cluster.started(request, decision.placement, decision.prediction, now)
    cluster.observed(request.request_id, ttft_s, *timings)
    cluster.prefilled(request.request_id)
    cluster.ended(request.request_id)


def test_workers_that_are_slower_than_they_say_are_predicted_as_they_are():
    cluster = cluster_of(num_encoders=1, num_prefills=1, num_decodes=1)
    for idx in range(200):
        image, words = media(400, name=f"r{idx}"), text(160, f"t{idx}")
        serve(cluster, image, idx, 0.17, [EncodeTiming(encoding_s=2 * 0.05)], None)
        serve(cluster, words, idx + 0.5, 1.5 * 0.026, None, PrefillTiming(computing_s=1.5 * 0.026))
    factors = cluster.calibration.factors
    assert factors[Role.ENCODE, ""] == pytest.approx(2.0, rel=0.05)
    assert factors[Role.PREFILL, ""] == pytest.approx(1.5, rel=0.05)
    for request, ttft_s in ((media(400), 0.17), (text(160), 1.5 * 0.026)):
        prediction = JointPolicy().decide(request, cluster, 200.0).prediction
        assert prediction.ttft_s == pytest.approx(ttft_s, rel=0.03)
        assert prediction.low_s <= ttft_s <= prediction.high_s


def test_who_shared_a_worker_shows_nothing_of_its_speed():
    cluster = cluster_of(num_encoders=1, num_prefills=1, num_decodes=1)
    timing = PrefillTiming(queued_s=0.2, computing_s=1.0)
    for idx in range(50):
        serve(cluster, text(160, f"t{idx}"), idx, 1.1, None, timing)
        serve(
            cluster, media(400, name=f"r{idx}"), idx + 0.5, 1.1, [EncodeTiming(queued_s=1.0, encoding_s=1.0)]
        )
    assert not cluster.calibration.factors


def test_what_no_worker_accounts_for_is_part_of_every_prediction():
    cluster = cluster_of()
    for idx in range(100):
        serve(cluster, text(160, f"t{idx}"), idx, 0.036, None, PrefillTiming(computing_s=0.026))
    assert JointPolicy().decide(text(16), cluster, 100.0).prediction.ttft_s == pytest.approx(
        0.0116 + 0.01, rel=0.05
    )


def test_what_an_unknown_request_took_is_ignored():
    cluster = cluster_of()
    cluster.observed("nobody", 1.0)
    assert cluster.calibration.accuracy.num_observed == 0


def test_the_parts_of_a_corrected_prediction_still_add_up():
    cluster, policy = cluster_of(), JointPolicy()
    for idx in range(50):
        request = text(name=f"r{idx}")
        decision = policy.decide(request, cluster, float(idx))
        cluster.started(request, decision.placement, decision.prediction, float(idx))
        cluster.observed(request.request_id, 0.2)
        cluster.ended(request.request_id)
    prediction = policy.decide(text(), cluster, 50.0).prediction
    assert prediction.ttft_s > 0.03
    assert prediction.queue_s + prediction.media_s + prediction.prefill_s == pytest.approx(prediction.ttft_s)
