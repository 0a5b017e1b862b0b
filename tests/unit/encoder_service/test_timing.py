"""Where an item's time at its encoder goes, on a clock that the test moves."""

from __future__ import annotations

import msgspec
import pytest

from cluster.types.messages import Encoded
from cluster.types.timings import EncodeTiming
from tests.fakes.encoder import EncoderRig
from tests.fakes.requests import make_item, make_video

PREPARE_S, CALL_S = 0.5, 2.0
ITEM = make_item("a", 5)


@pytest.fixture
def rig():
    rig = EncoderRig(cache_blocks=6, feature_blocks=12)
    runner = rig.runners["encoder"]
    prepare, encode = runner.prepare, runner.encode

    def slow_prepare(item, is_wanted):
        rig.clock.at += PREPARE_S
        return prepare(item, is_wanted)

    def slow_encode(modality, pieces):
        rig.clock.at += CALL_S
        return encode(modality, pieces)

    runner.prepare, runner.encode = slow_prepare, slow_encode
    yield rig
    rig.finish()


def finish_transfers(rig, after_s: float) -> None:
    rig.clock.at += after_s
    rig.encoder.transfer_engine.step()
    rig.prefill.feature_transfer_engine.step()
    rig.encoder.step()


def told(rig) -> dict[str, EncodeTiming]:
    return {message.request_id: message.timing for message in rig.said(Encoded)}


def total(timing: EncodeTiming) -> float:
    return sum(msgspec.structs.astuple(timing))


def test_each_phase_has_its_own_time(rig):
    rig.start(ITEM)
    rig.clock.at += 0.125  # the engine is busy
    rig.encoder.inbox.run()
    rig.prepare_all()
    rig.clock.at += 0.25  # … again
    rig.encoder.step()
    rig.clock.at += 1.0  # prefill has no room
    rig.target(ITEM)
    rig.encoder.step()
    finish_transfers(rig, after_s=4.0)
    assert told(rig) == {"r": EncodeTiming(0.125 + PREPARE_S, 0.25, CALL_S, 1.0, 4.0)}


def test_a_delivery_that_shares_an_item_counts_the_phases_since_it_came(rig):
    rig.start(ITEM)
    rig.prepare_all()
    rig.clock.at += 0.25
    rig.start(ITEM, "late")  # prepared, not yet encoded
    rig.clock.at += 0.25
    rig.encoder.step()
    rig.start(ITEM, "cached")
    for name in ("r", "late", "cached"):
        rig.target(ITEM, name)
    rig.clock.at += 1.0
    rig.encoder.step()
    finish_transfers(rig, after_s=0.0)
    assert told(rig) == {
        "r": EncodeTiming(PREPARE_S, 0.5, CALL_S, 1.0, 0.0),
        "late": EncodeTiming(0.0, 0.25, CALL_S, 1.0, 0.0),
        "cached": EncodeTiming(0.0, 0.0, 0.0, 1.0, 0.0),
    }


def test_the_calls_of_a_long_item_and_those_of_others_between_them_are_its_encoding(rig):
    video = make_video("v", 8)  # two pieces
    rig.deliver(video)
    rig.prepare_all()
    rig.encoder.step()
    rig.deliver(ITEM, "urgent", priority=-5)
    rig.prepare_all()
    for _ in range(5):
        rig.encoder.step()
        finish_transfers(rig, after_s=0.0)
    assert told(rig)["r"] == EncodeTiming(PREPARE_S, 0.0, 3 * CALL_S + PREPARE_S, 0.0, 0.0)


def test_rows_that_were_evicted_cost_the_time_of_making_them_again(rig):
    rig.start(ITEM)
    rig.step()
    rig.start(make_item("large", 20), "other")
    rig.step()
    assert "a" not in rig.cache
    rig.target(ITEM)
    rig.step()
    finish_transfers(rig, after_s=0.25)
    timing = told(rig)["r"]
    assert total(timing) == rig.clock.at
    assert (timing.encoding_s, timing.sending_s) == (CALL_S, 0.25)


def test_what_was_measured_is_learnt_by_modality(rig):
    rig.deliver(ITEM)
    rig.step()
    finish_transfers(rig, after_s=0.0)
    fits, modality = rig.encoder.engine.fits, ITEM.modality
    encode, prepare = fits.encode[modality].curve(), fits.prepare[modality].curve()
    assert encode is not None and encode.seconds(5) == pytest.approx(CALL_S)
    assert prepare is not None and prepare.seconds(5) == pytest.approx(PREPARE_S)
