"""The decode engine when blocks run out, stepped by hand: which request is preempted, and which blocks are
kept."""

import pytest

from cluster.types.messages import (
    Cancel,
    FinishReason,
    Preempted,
)  # fmt: skip
from tests.fakes.requests import make_request, salted


def test_the_newest_is_preempted_when_blocks_run_out_and_all_answers_are_whole(rig, relay):
    for i in range(3):  # 3 × (2 prompt blocks + 5 of the answer) do not fit into 10
        relay.start(make_request(f"r{i}", 6, max_tokens=20))
    relay.play(300)
    assert rig.decode.engine.load().totals.num_preempted > 0
    for i in range(3):
        assert relay.stories[f"r{i}"].tokens == list(range(50, 70))
        assert relay.stories[f"r{i}"].finish_reason is FinishReason.LENGTH


def test_the_oldest_is_never_preempted(rig, relay):
    relay.start(make_request("old", 6, max_tokens=20))
    relay.play(3)
    for i in range(4):
        rig.clock.at += 0.1
        relay.start(make_request(f"young{i}", 6, max_tokens=20))
    preempted = []
    for _ in range(300):
        rig.turn()
        preempted += [m.request_id for m in rig.decode.said if isinstance(m, Preempted)]
        relay.play(1)
    assert preempted and "old" not in preempted


def test_nothing_is_run_for_a_request_that_preempted_itself(rig, relay):
    """Two rows fill a step, so each request runs alone, and the newer one asks for the last blocks."""
    runner, sizes = rig.runners["decode"], []
    run = runner.run
    runner.run = lambda works, *rest: sizes.append(len(works)) or run(works, *rest)
    relay.start(make_request("old", 6, max_tokens=12, num_choices=2))
    rig.clock.at += 0.1
    relay.start(make_request("new", 6, max_tokens=12, num_choices=2))
    relay.play(200)
    assert rig.decode.engine.load().totals.num_preempted > 0
    assert set(sizes) == {1, 2} and relay.stories["new"].is_over


def test_choices_are_preempted_and_resumed_one_by_one(rig, relay):
    first = relay.start(make_request("a", 6, max_tokens=20))
    rig.clock.at += 0.1
    story = relay.start(make_request("r", 6, max_tokens=12, num_choices=2))
    relay.play(300)
    assert rig.decode.engine.load().totals.num_preempted > 0
    assert first.tokens == list(range(50, 70))
    assert [line.token_ids for line in story.lines] == [list(range(50, 62))] * 2


def test_prompts_computed_here_are_preempted_and_computed_again(rig, relay):
    for i in range(3):
        relay.start(make_request(f"r{i}", 6, max_tokens=20), prefills_locally=True)
    relay.play(300)
    assert rig.decode.engine.load().totals.num_preempted > 0
    assert [relay.stories[f"r{i}"].tokens for i in range(3)] == [list(range(50, 70))] * 3


@pytest.mark.parametrize("choice_idx", [0, 1])
def test_blocks_are_kept_for_those_that_wait_no_longer_than_they_do(rig, relay, choice_idx):
    """A choice that leaves before the request has blocks was never counted among those that have."""
    pool = rig.pools["decode"]
    relay.start(make_request("large", 30, max_tokens=2), prefills_locally=True)
    relay.play(1)
    relay.start(salted(make_request("r", 7, max_tokens=3, num_choices=2)), prefills_locally=True)
    relay.play(1)
    rig.receive("decode", Cancel("r", choice_idx))
    relay.play(1)
    assert pool.num_free == 2, "r would fit, and large could not grow"
    relay.play()
    last = relay.start(salted(make_request("last", 36, max_tokens=2)), prefills_locally=True)
    relay.play()
    assert last.tokens == [50, 51], "it needs all blocks; none are kept for those that have ended"


def test_a_new_request_does_not_get_the_block_that_a_running_one_needs_next(rig, relay):
    """The newcomer's prompt would fill the pool, and lose its blocks at once."""
    old = relay.start(make_request("old", 7, max_tokens=12), prefills_locally=True)
    while rig.pools["decode"].num_referenced < 3:
        relay.play(1)
    rig.clock.at += 0.1
    new = relay.start(salted(make_request("new", 27, max_tokens=2)), prefills_locally=True)
    relay.play(100)
    assert old.tokens == list(range(50, 62)) and new.tokens == [50, 51]
    assert rig.decode.engine.load().totals.num_preempted == 0
