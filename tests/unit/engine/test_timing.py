"""Where a request's time at prefill goes, on a clock that the test moves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.timing import Part, Stopwatch
from cluster.types.messages import TokenEvent
from cluster.types.timings import PrefillTiming
from tests.fakes.engines import Rig
from tests.fakes.requests import make_item, make_request

STEP_S = 0.5


class TimedRig(Rig):
    """Every prefill step lasts half a second. Keeps the timing of each first token, and when it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, PrefillTiming] = {}
        self.told_at: dict[str, float] = {}
        self._token = self.prefill.outbox.token
        self.prefill.outbox.token = self._hear  # type: ignore[method-assign]
        self.mid_step = self._compute

    def _compute(self) -> None:
        self.clock.at += STEP_S

    def _hear(self, door: int, event: TokenEvent) -> None:
        if event.timing is not None:
            assert event.request_id not in self.told and event.choice_idx == 0
            self.told[event.request_id] = event.timing
            self.told_at[event.request_id] = self.clock.at
        self._token(door, event)


@pytest.fixture
def rig():
    return TimedRig()


def hand_over(relay):
    """Prefill has been sent whatever there is for it."""
    while relay.to_worker["prefill"]:
        relay.send_one("prefill")


def total(timing: PrefillTiming) -> float:
    return sum(msgspec.structs.astuple(timing))


def test_a_prompt_of_two_steps_computes_for_as_long_as_they_last(rig, relay):
    relay.start(make_request("r", 15))
    hand_over(relay)
    rig.prefill.step()
    rig.clock.at += 0.25  # the engine's thread is elsewhere
    rig.prefill.step()
    assert rig.told == {"r": PrefillTiming(computing_s=2 * STEP_S, queued_s=0.25)}


def test_of_several_choices_the_first_one_has_the_timing(rig, relay):
    relay.start(make_request("r", 5, num_choices=3))
    hand_over(relay)
    rig.prefill.step()
    assert rig.told == {"r": PrefillTiming(computing_s=STEP_S)}


def test_waiting_while_the_engine_is_busy_counts_from_the_message(rig, relay):
    relay.start(make_request("r", 5))
    hand_over(relay)
    rig.clock.at += 3.0
    rig.prefill.step()
    assert rig.told == {"r": PrefillTiming(queued_s=3.0, computing_s=STEP_S)}


def test_a_request_waits_for_blocks_until_others_give_theirs_back(rig, relay):
    relay.start(make_request("large", 90, max_tokens=2))
    hand_over(relay)
    rig.prefill.step()
    request = make_request("r", 21, max_tokens=2)
    prompt = msgspec.structs.replace(request.prompt, cache_salt="shares no block")
    relay.start(msgspec.structs.replace(request, prompt=prompt))
    hand_over(relay)
    came_at = rig.clock.at
    while "r" not in rig.told:
        relay.play(1)
    timing = rig.told["r"]
    assert timing.blocks_s >= rig.told_at["large"] - came_at > 2
    assert timing.computing_s == 3 * STEP_S
    assert total(timing) == pytest.approx(rig.told_at["r"] - came_at)


def test_waiting_for_embeddings_is_no_waiting_for_the_device(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    hand_over(relay)
    rig.prefill.step()  # the text before the item
    rig.clock.at += 2.0
    while "r" not in rig.told:
        relay.play(1)
    assert rig.told["r"] == PrefillTiming(media_s=2.0, computing_s=2 * STEP_S)


def test_embeddings_that_come_during_a_step_of_others_end_the_wait_for_media_then(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    relay.start(make_request("other", 30))
    hand_over(relay)
    rig.prefill.step()  # the text before the item
    request = rig.prefill.engine.requests["r"]
    assert request.stopwatch.part is Part.MEDIA

    def step_of_others():
        rig.clock.at += 1.0
        send_embeddings(rig, relay)
        rig.clock.at += 3.0

    rig.mid_step = step_of_others
    rig.prefill.step()
    rig.prefill.inbox.run()
    timing = request.stopwatch.timing(rig.clock.at)
    assert (timing.media_s, timing.queued_s) == (1.0, 3.0)


def send_embeddings(rig, relay):
    """The encoder and the transfer do all that there is, while prefill's engine is busy."""
    for _ in range(5):
        for name in ("encoder", "prefill"):
            while rig.workers[name].said:
                relay.hear_one(name)
            while relay.to_worker[name]:
                relay.send_one(name)
        rig.executor.run_one()
        rig.encoder.step()
        for worker in (rig.encoder, rig.prefill):
            worker.feature_transfer_engine.step()


def test_a_negative_prompt_that_can_be_computed_is_no_wait_for_media(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item], negative=12), [item])
    hand_over(relay)
    rig.prefill.step()
    assert rig.prefill.engine.requests["r"].stopwatch.part is Part.QUEUED
    rig.prefill.step()
    assert rig.prefill.engine.requests["r"].stopwatch.part is Part.MEDIA


@given(st.lists(st.tuples(st.sampled_from(Part), st.floats(-5, 5)), max_size=20))
def test_the_parts_sum_to_the_time_since_the_message_whatever_happens(changes):
    watch, at = Stopwatch(100.0), 100.0
    for part, later_s in changes:
        at += later_s
        watch.turn_to(part, at)
    end = watch.since + 1.0
    timing = watch.timing(end)
    assert total(timing) == pytest.approx(end - 100.0)
    assert min(msgspec.structs.astuple(timing)) >= 0


def test_the_sums_of_a_crowd_are_their_time_from_message_to_first_token(rig, relay):
    came_at: dict[str, float] = {}
    item = make_item("a", 5)
    for i in range(8):
        items = [item] * (i % 2)
        relay.start(make_request(f"r{i}", 9 + 4 * i, items, max_tokens=2, negative=5 * (i == 4)), items)
        came_at[f"r{i}"] = rig.clock.at
        hand_over(relay)
        relay.play(1)
        rig.clock.at += 0.25
    relay.play()
    assert set(rig.told) == set(came_at)
    for name, timing in rig.told.items():
        assert total(timing) == pytest.approx(rig.told_at[name] - came_at[name]), name
        assert timing.computing_s > 0
    assert any(timing.queued_s for timing in rig.told.values())
    assert any(timing.blocks_s for timing in rig.told.values())
