"""Prompts that the decode engine computes itself, stepped by hand."""

import math

import msgspec
import pytest

from cluster.types.messages import Cancel, Failed, Tokens
from tests.fakes.engines import POLICY, TIMEOUT_S
from tests.fakes.language_runner import prompts_in
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


def record_parts(rig):
    """Per step with prompts: (first token, number of tokens) of each."""
    runner, parts = rig.runners["decode"], []
    run = runner.run

    def recorded(works, *rest):
        if prompts := prompts_in(works):
            parts.append([(work.sequence.num_computed_tokens, work.num_tokens) for work in prompts])
        return run(works, *rest)

    runner.run = recorded
    return parts


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 6, 7, 8, 15])  # but for one
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_prompt_computed_here_needs_no_prefill_worker(rig, relay, num_tokens, num_choices):
    story = relay.start(
        make_request("r", num_tokens, max_tokens=6, num_choices=num_choices), prefills_locally=True
    )
    relay.play()
    assert [line.token_ids for line in story.lines] == [[50, 51, 52, 53, 54, 55]] * num_choices
    assert rig.ended == ["r"] and not rig.prefill.engine.requests


def test_a_prompt_is_computed_a_block_at_a_time_and_the_others_go_on(rig, relay):
    running = relay.start(make_request("old", 3, max_tokens=20), prefills_locally=True)
    relay.play(2)
    parts = record_parts(rig)
    story = relay.start(make_request("new", 18, max_tokens=2), prefills_locally=True)
    num_before = len(running.tokens)
    while not story.tokens:
        relay.play(1)
    assert parts == [[(0, 4)], [(4, 4)], [(8, 4)], [(12, 4)], [(16, 3)]]
    assert len(running.tokens) - num_before == len(parts)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_prompt_that_delays_no_other_is_computed_in_longer_steps(rig, relay, is_alone):
    if not is_alone:
        relay.start(make_request("old", 3, max_tokens=20), prefills_locally=True)
        relay.play(2)
    planner = rig.decode.engine.planner
    limits = planner.budget = LimitRecorder(planner.budget)
    relay.start(make_request("new", 18, max_tokens=2), prefills_locally=True)
    relay.play()
    assert limits.seen and limits.seen[0] == (math.inf if is_alone else POLICY.prompt_pause_s)


def test_short_prompts_share_a_local_prefill_step_and_go_before_long_ones(rig, relay):
    parts = record_parts(rig)
    for request_id, num_tokens in (("long", 15), ("a", 2), ("b", 0), ("c", 1)):
        relay.start(make_request(request_id, num_tokens, max_tokens=1), prefills_locally=True)
    relay.play(1)
    assert [len(batch) for batch in parts] == [3] and sorted(rig.ended) == ["b", "c"]
    relay.play()
    assert all(story.tokens == [50] for story in relay.stories.values())


def test_a_first_token_does_not_wait_for_the_step_that_follows(rig, relay):
    relay.start(make_request("r", 3, max_tokens=5), prefills_locally=True)
    relay.send_one("decode")
    rig.decode.step()
    told = [said for said in rig.decode.said if isinstance(said, Tokens)]
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


def test_a_prompt_that_waits_too_long_to_be_computed_is_given_up_by_name(rig, relay):
    """The door has it tried again, unless its own deadline has come: in here it has none."""
    story = relay.start(make_request("r", 17), prefills_locally=True)
    relay.play(2)
    rig.clock.at += TIMEOUT_S
    rig.decode.step()
    (failed,) = [said for said in rig.decode.said if isinstance(said, Failed)]
    assert "waited too long for embeddings or its turn to compute the prompt" in failed.error.message
    relay.play()
    assert rig.ended == ["r", "r.1"] and story.finish_reason is not None


@pytest.mark.parametrize("num_choices", [1, 2])
def test_media_are_encoded_for_a_prompt_computed_here(rig, relay, num_choices):
    item = make_item("a", 3)
    request = make_request("r", 6, [item], num_choices=num_choices)
    story = relay.start(request, [item], prefills_locally=True)
    relay.play()
    assert [line.token_ids for line in story.lines] == [[50, 51, 52, 53]] * num_choices and rig.ended == ["r"]
    assert rig.encoder.transfer_engine.sent.raw_bytes > 0 and not rig.prefill.engine.load().num_cached_blocks


@pytest.mark.parametrize("num_rounds", range(7))
def test_a_prompt_with_media_computed_here_may_be_cancelled_at_any_moment(rig, relay, num_rounds):
    items = [make_item("a", 3), make_item("b", 5)]
    relay.start(make_request("r", 17, items, max_tokens=3), items, prefills_locally=True)
    relay.play(num_rounds)
    relay.land("r")
    relay.finish()
    assert rig.ended == ["r"] and rig.pools["decode"].num_referenced == 0


def test_an_encoder_that_is_lost_is_replaced_for_a_prompt_computed_here(rig, relay):
    item = make_item("a", 3)
    story = relay.start(make_request("r", 6, [item]), [item], prefills_locally=True)
    relay.send_one("decode")
    relay.send_one("encoder")
    relay.lose_worker("encoder", dies=True)
    relay.play()
    assert story.tokens == [50, 51, 52, 53] and story.error is None


def test_scored_prompts_are_computed_from_their_first_token_with_their_media(rig, relay):
    item = make_item("a", 3)
    first = make_request("first", 6, [item])
    relay.start(first, [item])
    relay.play()
    before = rig.encoder.transfer_engine.sent.raw_bytes
    scored = msgspec.structs.replace(first, request_id="scored", num_prompt_logprobs=0)
    story = relay.start(scored, [item], prefills_locally=True)
    relay.play()
    assert story.is_over and story.error is None
    assert rig.encoder.transfer_engine.sent.raw_bytes == 2 * before


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_negative_prompt_may_be_computed_here_too(rig, relay, num_choices):
    request = make_request("r", 6, negative=5, num_choices=num_choices)
    story = relay.start(request, prefills_locally=True)
    relay.play()
    assert [line.token_ids for line in story.lines] == [[50, 51, 52, 53]] * num_choices
