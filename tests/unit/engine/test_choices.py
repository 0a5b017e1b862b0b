"""Requests with several sequences in the decode engine, stepped by hand: choices, a negative prompt, and
drafts for each."""

import pytest

from cluster.types.messages import (
    Cancel,
)  # fmt: skip
from tests.fakes.language_runner import answers_in
from tests.fakes.requests import make_request


def test_choices_share_the_prompt_and_each_has_its_own_answer(rig, relay):
    story = relay.start(make_request("r", 8, max_tokens=5, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 2 + 3  # two full blocks shared, the third one copied
    relay.play()
    assert [line.token_ids for line in story.lines] == [[50, 51, 52, 53, 54]] * 3


def test_a_choice_that_is_cancelled_leaves_the_others_alone(rig, relay):
    story = relay.start(make_request("r", 6, max_tokens=8, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    rig.receive("decode", Cancel("r", 1))
    relay.play(1)
    assert rig.decode.engine.load().num_queued_units == 2
    relay.play()
    assert [len(line.token_ids) for line in story.lines][::2] == [8, 8]
    assert len(story.lines[1].token_ids) < 8 and rig.decode.engine.load().num_running == 0
    relay.land("r")


def test_a_negative_prompt_has_kv_of_its_own_and_counts_as_a_sequence(rig, relay):
    story = relay.start(make_request("r", 8, max_tokens=5, negative=5))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 3 + 2
    assert rig.decode.engine.load().num_queued_units == 2
    relay.play()
    assert story.tokens == [50, 51, 52, 53, 54]


def test_a_pair_that_cannot_fit_is_refused_with_the_numbers(rig, relay):
    story = relay.start(make_request("r", 20, max_tokens=4, negative=20))
    relay.play(5)
    assert "52 tokens" in story.error and "holds 40" in story.error


@pytest.mark.parametrize(
    "ends", ["at its length", "by a stop token", "by a cancel", "by preemption", "at its first token"]
)
def test_speculation_forgets_every_choice_that_has_ended(rig, relay, ends):
    forgotten, begun, runner = [], set(), rig.runners["decode"]
    run = runner.run
    runner.forget = lambda choice: forgotten.append(choice.request_id)
    runner.run = lambda works, *rest: (
        begun.update(c.request_id for request in answers_in(works) for c in request.live_choices)
        or run(works, *rest)
    )
    stop = {"by a stop token": (52,), "at its first token": (50,)}.get(ends, ())
    for n in range(3 if ends == "by preemption" else 1):
        relay.start(make_request(f"r{n}", 6, max_tokens=9, num_choices=2, stop=stop))
        rig.clock.at += 0.1
    relay.play(4)
    if ends == "by a cancel":
        rig.receive("decode", Cancel("r0", 1))
        relay.play(1)
        assert forgotten == ["r0/1"]
        relay.land("r0")
    relay.play(300)
    assert begun <= set(forgotten) and len(forgotten) == len(set(forgotten))
    assert (rig.decode.engine.load().totals.num_preempted > 0) == (ends == "by preemption")
    assert bool(begun) == (ends != "at its first token") and {"r0/0", "r0/1"} <= set(forgotten)
