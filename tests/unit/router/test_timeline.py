"""Where a request's time went: stages that sum to it, whatever is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types.messages import EncodeTiming, PrefillTiming
from router.policy import Decision, ItemPrediction, Placement, Prediction
from router.telemetry.timeline import RequestTimeline

STAGES = (
    "fetch", "probe", "admission", "route", "prefill_blocks", "encode_queue", "encode", "embedding_transfer",
    "prefill_queue", "prefill", "delivery",
)  # fmt: skip
seconds = st.floats(0, 10)


def decision(ttft_s: float = 0.5) -> Decision:
    prediction = Prediction(0.1, 0.2, 0.2, ttft_s, 0.01, 0.02, 0.4, 0.7, (ItemPrediction(0.05, 0.1, 0.01),))
    other = Placement(("e1",), None, "d1")
    return Decision(Placement(("e0",), "p0", "d0"), prediction, ((other, 0.6),))


@given(gaps=st.lists(seconds, min_size=5, max_size=5), work=st.lists(seconds, min_size=4, max_size=4), last=st.none() | st.lists(seconds, min_size=5, max_size=5))  # fmt: skip
def test_the_stages_sum_to_the_time_to_the_first_token(gaps, work, last):
    ledger = RequestTimeline(100.0)
    at = [100.0]
    for gap in gaps:
        at.append(at[-1] + gap)
    ledger.prepared(at[1], at[2])
    ledger.launched(at[3], at[4], decision())
    if last is not None:
        ledger.encoded(0, EncodeTiming(*last), cached=False)
    timing = PrefillTiming(*work)
    first_at = at[4] + sum(work) + gaps[4]
    assert ledger.token(first_at, timing, 0.0)
    stages = ledger.stages()
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx(first_at - 100.0, abs=1e-6)
    assert stages["encode_queue"] + stages["encode"] + stages["embedding_transfer"] == pytest.approx(work[1])
    assert all(value > -1e-6 for value in stages.values())


def test_the_wait_for_embeddings_is_split_by_the_account_of_the_item_that_came_last():
    ledger = RequestTimeline(0.0)
    ledger.launched(0.0, 0.0, decision())
    ledger.encoded(0, EncodeTiming(9.0, 9.0, 9.0, 9.0, 9.0), cached=False)
    ledger.encoded(
        1,
        EncodeTiming(preparing_s=0.1, queued_s=0.5, encoding_s=0.2, target_s=0.0, sending_s=0.05),
        cached=False,
    )
    ledger.token(1.0, PrefillTiming(media_s=0.4), 0.0)
    stages = ledger.stages()
    assert stages["embedding_transfer"] == pytest.approx(0.05)
    assert stages["encode"] == pytest.approx(0.3)
    assert stages["encode_queue"] == pytest.approx(0.05)


def test_a_request_launched_again_keeps_its_first_launch_and_its_last_decision():
    ledger = RequestTimeline(0.0)
    ledger.launched(1.0, 2.0, decision(0.5))
    ledger.launched(5.0, 6.0, decision(0.7))
    assert ledger.predicted_ttft_s == pytest.approx(2.7) and ledger.stages()["admission"] == 1.0


def test_the_second_token_is_split_into_transfer_and_step():
    ledger = RequestTimeline(0.0)
    assert (
        ledger.token(1.0, None, 0.0) and not ledger.token(1.5, None, 0.2) and not ledger.token(9.0, None, 7.0)
    )
    assert ledger.tail() == {"kv_transfer": pytest.approx(0.3), "first_step": pytest.approx(0.2)}


def test_an_answer_says_what_was_predicted_and_what_else_was_considered():
    ledger = RequestTimeline(0.0)
    ledger.prepared(0.25, 0.5)
    ledger.launched(0.5, 1.0, decision())
    ledger.encoded(0, EncodeTiming(0.001, 0.002, 0.003, 0.0, 0.004), cached=True)
    ledger.token(2.0, PrefillTiming(computing_s=1.0), 0.0)
    fields = ledger.fields()
    assert fields["ttft_ms"] == 2000 and fields["predicted_ms"]["ttft"] == 1500
    assert (fields["predicted_ms"]["low"], fields["predicted_ms"]["high"]) == (1400, 1700)
    assert fields["placement"] == {"encoders": ["e0"], "prefill": "p0", "decode": "d0", "codec": "raw"}
    assert fields["alternatives"] == [
        {"encoders": ["e1"], "prefill": "d1", "decode": "d1", "codec": "raw", "predicted_ttft_ms": 1600}
    ]
    assert fields["items_ms"] == [
        {"item": 0, "cached": True, "prepare": 1, "queue": 2, "encode": 3, "target": 0, "transfer": 4}
    ]
    assert ledger.header().startswith(
        "ttft;dur=2000.0, predicted;dur=1500.0, fetch;dur=250.0, probe;dur=250.0, "
    )
    assert ledger.timings(1) == [None]
