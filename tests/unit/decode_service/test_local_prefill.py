"""Prompts that the decode engine computes itself, stepped by hand."""

import pytest

from cluster.types.messages import (
    Cancel,
)  # fmt: skip
from decode_service.local_prefill import LOCAL_PREFILL_STEP_S, LONE_STEP_S
from tests.fakes.engines import TIMEOUT_S
from tests.fakes.requests import make_item, make_request


class LimitRecorder:
    """A step budget that remembers how long steps were allowed to last."""

    def __init__(self, budget):
        self._budget = budget
        self.seen = []

    def max_tokens(self, context, limit_s):
        self.seen.append(limit_s)
        return self._budget.max_tokens(context, limit_s)

    def __getattr__(self, name):
        return getattr(self._budget, name)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 6, 7, 8, 15])  # but for one
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_prompt_computed_here_needs_no_prefill_worker(rig, relay, num_tokens, num_choices):
    story = relay.start(
        make_request("r", num_tokens, max_tokens=6, num_choices=num_choices), prefills_locally=True
    )
    relay.play()
    assert [line.tokens for line in story.lines] == [[50, 51, 52, 53, 54, 55]] * num_choices
    assert rig.ended == ["r"] and not rig.prefill.engine._requests


def test_a_prompt_is_computed_a_block_at_a_time_and_the_others_go_on(rig, relay):
    running = relay.start(make_request("old", 3, max_tokens=20), prefills_locally=True)
    relay.play(2)
    parts, compute = [], rig.decode.engine._local_prefill._runner.compute
    rig.decode.engine._local_prefill._runner.compute = lambda batch: parts.extend(batch) or compute(batch)
    story = relay.start(make_request("new", 18, max_tokens=2), prefills_locally=True)
    num_before = len(running.tokens)
    while not story.tokens:
        relay.play(1)
    assert [(part.start, len(part.token_ids)) for part in parts] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 3)]
    assert len(running.tokens) - num_before == len(parts)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_prompt_that_delays_no_other_is_computed_in_longer_steps(rig, relay, is_alone):
    if not is_alone:
        relay.start(make_request("old", 3, max_tokens=20), prefills_locally=True)
        relay.play(2)
    local_prefill = rig.decode.engine._local_prefill
    limits = local_prefill._budget = LimitRecorder(local_prefill._budget)
    relay.start(make_request("new", 18, max_tokens=2), prefills_locally=True)
    relay.play()
    assert limits.seen and set(limits.seen) == {LONE_STEP_S if is_alone else LOCAL_PREFILL_STEP_S}


def test_short_prompts_share_a_local_prefill_step_and_go_before_long_ones(rig, relay):
    batches, compute = [], rig.decode.engine._local_prefill._runner.compute
    rig.decode.engine._local_prefill._runner.compute = lambda batch: (
        batches.append(len(batch)) or compute(batch)
    )
    for request_id, num_tokens in (("long", 15), ("a", 2), ("b", 0), ("c", 1)):
        relay.start(make_request(request_id, num_tokens, max_tokens=1), prefills_locally=True)
    relay.play(1)
    assert batches == [3] and sorted(rig.ended) == ["b", "c"]  # the first token of a is yet to be computed
    relay.play()
    assert all(story.tokens == [50] for story in relay.stories.values())


def test_a_first_token_does_not_wait_for_the_step_that_follows(rig, relay):
    relay.start(make_request("r", 3, max_tokens=5), prefills_locally=True)
    relay.send_one("decode")
    run, told = rig.decode.engine._runner.run, []
    rig.decode.engine._runner.run = lambda batch: told.extend(rig.decode.said) or run(batch)
    rig.decode.step()
    assert [event.token_ids for said in told for event in said.events] == [(50,)]


@pytest.mark.parametrize("num_rounds", range(9))
def test_a_prompt_computed_here_may_be_cancelled_at_any_moment(rig, relay, num_rounds):
    relay.start(make_request("r", 17, max_tokens=3, num_choices=2), prefills_locally=True)
    relay.play(num_rounds)
    rig.receive("decode", Cancel("r", 1))
    relay.play(1)
    relay.land("r")
    relay.play(2)
    assert rig.ended == ["r"] and rig.pools["decode"].num_referenced == 0


def test_a_prompt_that_waits_too_long_to_be_computed_fails_by_name(rig, relay):
    story = relay.start(make_request("r", 17), prefills_locally=True)
    relay.play(2)
    rig.clock.at += TIMEOUT_S
    relay.play(1)
    assert story.error == "decode waited too long for its turn to compute the prompt"


@pytest.mark.parametrize("changes", [{"items": [make_item("a", 3)]}, {"negative": 3}])
def test_what_decode_cannot_compute_is_not_begun(rig, relay, changes):
    story = relay.start(make_request("r", 6, **changes), prefills_locally=True)
    relay.play(2)
    assert "without a negative prompt" in story.error and rig.ended == ["r"]
