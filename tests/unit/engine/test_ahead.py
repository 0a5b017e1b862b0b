"""The decode engine when the next forward is enqueued before tokens are read, stepped by hand. The runner
writes what it has enqueued as late as it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.engine.sequence import TokenSequence
from cluster.engine.state import AnswerChoice
from cluster.errors import BookkeepingError
from cluster.kvcache.blocks import BlockPool
from cluster.types.messages import Cancel, FinishReason
from tests.fakes.engines import Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import make_request

SAID = list(range(50, 70))


@pytest.fixture
def rig() -> Rig:
    return Rig(decode_blocks=16, runs_ahead=True)


def num_ahead(rig: Rig) -> int:
    return rig.runners["decode"].num_ahead


def test_a_lone_answer_is_always_one_forward_ahead_but_for_its_last_token(rig, relay):
    relay.start(make_request("r", 6, max_tokens=20))
    relay.play(60)
    assert relay.stories["r"].tokens == SAID
    assert num_ahead(rig) == 18  # 20 tokens: the first is the prompt's, and nothing follows the last


@pytest.mark.parametrize("field", [{"num_choices": 2}, {"negative": 5}])
def test_choices_and_guided_answers_go_ahead(rig, relay, field):
    relay.start(make_request("r", 6, max_tokens=20, **field))
    relay.play(60)
    assert all(line.token_ids == SAID for line in relay.stories["r"].lines)
    assert num_ahead(rig) == 18


@pytest.mark.parametrize("stop", range(54, 58))
def test_the_block_that_is_written_is_held_until_the_forward_has_ended(rig, relay, stop):
    """The answer ends, and its forward goes on, whose row may be the first in a block: it is free a turn
    later."""
    story = relay.start(make_request("r", 6, max_tokens=20, stop=(stop,)))
    pool, sequences = rig.pools["decode"], []
    while story.finish_reason is None:
        sequences += sequences_of(rig)
        relay.play(1)
    assert story.finish_reason is FinishReason.STOP
    written = sequences[-1].block_table[-1]
    assert pool.num_referenced == 1 and is_held(pool, written), "the forward in flight writes there"
    rig.decode.step()
    assert pool.num_referenced == 0


def test_the_state_that_is_written_is_held_until_the_forward_has_ended():
    """Of two places, it writes the one that the last step of the answer began with."""
    rig = Rig(kv_blocks=40, decode_blocks=40, runs_ahead=True, state_blocks=2)
    relay = Relay(rig)
    story = relay.start(make_request("r", 6, max_tokens=20, stop=(55,)))
    pool, places = rig.pools["decode"], []
    while story.finish_reason is None:
        places += [[*sequence.state] for sequence in sequences_of(rig)]
        relay.play(1)
    assert pool.num_referenced == 3 and all(is_held(pool, block) for block in places[-1])
    rig.decode.step()
    assert pool.num_referenced == 0
    relay.finish()


def sequences_of(rig: Rig) -> list[TokenSequence]:
    """Of answers."""
    requests = rig.decode.engine.requests.values()
    choices = [choice for request in requests for choice in request.live_choices]
    return [sequence for choice in choices for sequence in choice.sequences]


def is_held(pool: BlockPool, block_id: int) -> bool:
    try:
        pool.share([block_id])
    except BookkeepingError:
        return False
    pool.free([block_id])
    return True


def test_a_step_in_flight_takes_the_first_forced_token_of_each_answer(rig, relay):
    """Tokens 5 to 9 and 15 to 19 are forced. The first of them comes alone; behind it nothing is enqueued,
    and the next step computes what is left."""
    rig.draft = forced(lambda choice: 10 - choice.num_generated % 10 if choice.num_generated % 10 > 4 else 0)
    steps: list[int] = []
    rig.mid_decode = lambda: steps.append(num_ahead(rig))
    relay.start(make_request("r", 6, max_tokens=20))
    relay.play(60)
    assert relay.stories["r"].tokens == SAID
    assert len(steps) == 12 and num_ahead(rig) == 9


def test_forced_text_of_one_answer_does_not_stop_another(rig, relay):
    """Two forced tokens are as many as there are answers: one each is taken, and all steps go ahead."""
    rig.draft = forced(lambda choice: 2 if choice.request_id.startswith("forced") else 0)
    for name in ("forced", "plain"):
        relay.start(make_request(name, 6, max_tokens=20))
    relay.play(60)
    assert all(relay.stories[name].tokens == SAID for name in ("forced", "plain"))
    assert num_ahead(rig) >= 17


def forced(num_tokens: Callable[[AnswerChoice], int]) -> Callable[[AnswerChoice], list[int]]:
    """Drafts that are right."""
    return lambda choice: [choice.token_ids[-1] + 1 + i for i in range(num_tokens(choice))]


def test_what_is_new_joins_after_the_forward_in_flight(rig, relay):
    relay.start(make_request("old", 6, max_tokens=20))
    relay.play(6)
    before = num_ahead(rig)
    relay.start(make_request("new", 6, max_tokens=12))
    relay.play(60)
    assert relay.stories["old"].tokens == SAID and relay.stories["new"].tokens == SAID[:12]
    assert num_ahead(rig) > before + 8


def test_prompts_that_are_computed_here_are_not_shut_out(rig, relay):
    relay.start(make_request("old", 6, max_tokens=20))
    relay.play(6)
    relay.start(make_request("local", 10, max_tokens=8), prefills_locally=True)
    relay.play(60)
    assert relay.stories["old"].tokens == SAID and relay.stories["local"].tokens == SAID[:8]


@pytest.mark.parametrize("choice_idx", [None, 0])
def test_an_answer_may_be_cancelled_while_its_forward_is_in_flight(rig, relay, choice_idx):
    story = relay.start(make_request("r", 6, max_tokens=20, num_choices=2))
    relay.start(make_request("other", 6, max_tokens=20))
    relay.play(8)
    rig.receive("decode", Cancel("r", choice_idx=choice_idx))
    relay.play(80)
    assert relay.stories["other"].tokens == SAID
    assert (story.lines[1].token_ids == SAID) == (choice_idx == 0)


def test_preempted_answers_are_whole(relay, rig):
    for i in range(4):
        relay.start(make_request(f"r{i}", 6, max_tokens=20))
        rig.clock.at += 0.1
    relay.play(400)
    assert rig.decode.engine.load().totals.num_preempted > 0
    assert all(relay.stories[f"r{i}"].tokens == SAID for i in range(4))


def test_a_step_that_raises_is_repeated_without_a_forward_behind_it(rig, relay):
    runner = rig.runners["decode"]
    run, calls = runner.run, []

    def failing(works, on_layer, then=()):
        results = run(works, on_layer, then)
        calls.append(bool(then))
        if len(calls) == 4:
            raise RuntimeError("the results of this step are lost")
        return results

    runner.run = failing
    story = relay.start(make_request("r", 6, max_tokens=20))
    relay.play(60)
    assert calls[3:5] == [True, False] and story.tokens == SAID


def test_a_step_lasts_since_the_one_before_it(rig, relay):
    """A forward that is in flight has begun when the step before it ended: time between two steps counts."""
    seen = []
    observe = rig.decode.engine.fit.observe
    rig.decode.engine.fit.observe = lambda *args: seen.append(args[-1]) or observe(*args)
    relay.start(make_request("r", 6, max_tokens=12))
    for _ in range(40):
        rig.clock.at += 0.25
        relay.play(1)
    assert seen[0] < 0.25 and set(seen[1:]) == {0.25}
