"""Where a request's time went: stages that sum to it, whatever is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types.timings import EncodeTiming, PrefillTiming
from router.policy import Decision, ItemPrediction, Placement, Prediction
from router.telemetry.timeline import RequestTimeline

STAGES = (
    "fetch", "probe", "admission", "route", "prefill_blocks", "encode_queue", "encode", "embedding_transfer",
    "prefill_queue", "prefill", "delivery",
)  # fmt: skip
seconds = st.floats(0, 10)


def decision(ttft_s: float = 0.5) -> Decision:
    prediction = Prediction(0.1, 0.2, 0.2, ttft_s, 0.01, 0.02, 0.4, 0.7, (ItemPrediction(0.05, 0.1, 0.01),))
    other = Placement(("e1",), "d1", "d1")
    return Decision(Placement(("e0",), "p0", "d0"), prediction, ((other, 0.6),))


@given(gaps=st.lists(seconds, min_size=5, max_size=5), work=st.lists(seconds, min_size=4, max_size=4), last=st.none() | st.lists(seconds, min_size=5, max_size=5))  # fmt: skip
def test_the_stages_sum_to_the_time_to_the_first_token(gaps, work, last):
    timeline = RequestTimeline(100.0)
    at = [100.0]
    for gap in gaps:
        at.append(at[-1] + gap)
    timeline.prepared(at[1], at[2])
    timeline.placed(at[3], decision())
    timeline.started(at[4])
    if last is not None:
        timeline.encoded(0, EncodeTiming(*last), cached=False)
    timing = PrefillTiming(*work)
    first_at = at[4] + sum(work) + gaps[4]
    assert timeline.token(first_at, timing, 0.0)
    stages = timeline.stages()
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx(first_at - 100.0, abs=1e-6)
    assert stages["encode_queue"] + stages["encode"] + stages["embedding_transfer"] == pytest.approx(work[1])
    assert all(value > -1e-6 for value in stages.values())


def test_the_wait_for_embeddings_is_split_by_the_account_of_the_item_that_came_last():
    timeline = RequestTimeline(0.0)
    timeline.placed(0.0, decision())
    timeline.encoded(0, EncodeTiming(9.0, 9.0, 9.0, 9.0, 9.0), cached=False)
    timeline.encoded(
        1,
        EncodeTiming(preparing_s=0.1, queued_s=0.5, encoding_s=0.2, target_s=0.0, sending_s=0.05),
        cached=False,
    )
    timeline.token(1.0, PrefillTiming(media_s=0.4), 0.0)
    stages = timeline.stages()
    assert stages["embedding_transfer"] == pytest.approx(0.05)
    assert stages["encode"] == pytest.approx(0.3)
    assert stages["encode_queue"] == pytest.approx(0.05)


def test_a_request_launched_again_keeps_its_first_launch_and_its_last_decision():
    timeline = RequestTimeline(0.0)
    for at, ttft_s in ((1.0, 0.5), (5.0, 0.7)):
        timeline.placed(at, decision(ttft_s))
        timeline.started(at + 1.0)
    assert timeline.predicted_ttft_s == pytest.approx(2.7) and timeline.stages()["admission"] == 1.0


def test_the_second_token_is_split_into_transfer_and_step():
    timeline = RequestTimeline(0.0)
    assert (
        timeline.token(1.0, None, 0.0)
        and not timeline.token(1.5, None, 0.2)
        and not timeline.token(9.0, None, 7.0)
    )
    assert timeline.tail() == {"kv_transfer": pytest.approx(0.3), "first_step": pytest.approx(0.2)}


def test_an_answer_says_what_was_predicted_and_what_else_was_considered():
    timeline = RequestTimeline(0.0)
    timeline.prepared(0.25, 0.5)
    timeline.placed(0.5, decision())
    timeline.started(1.0)
    timeline.encoded(0, EncodeTiming(0.001, 0.002, 0.003, 0.0, 0.004), cached=True)
    timeline.token(2.0, PrefillTiming(computing_s=1.0), 0.0)
    fields = timeline.fields()
    assert fields["ttft_ms"] == 2000 and fields["predicted_ms"]["ttft"] == 1500
    assert (fields["predicted_ms"]["low"], fields["predicted_ms"]["high"]) == (1400, 1700)
    assert fields["placement"] == {"encoders": ["e0"], "prefill": "p0", "decode": "d0", "codec": "raw"}
    assert fields["alternatives"] == [
        {"encoders": ["e1"], "prefill": "d1", "decode": "d1", "codec": "raw", "predicted_ttft_ms": 1600}
    ]
    assert fields["items_ms"] == [
        {"item": 0, "cached": True, "prepare": 1, "queue": 2, "encode": 3, "target": 0, "transfer": 4}
    ]
    assert timeline.header().startswith(
        "ttft;dur=2000.0, predicted;dur=1500.0, fetch;dur=250.0, probe;dur=250.0, "
    )
    assert timeline.timings(1) == [None]
