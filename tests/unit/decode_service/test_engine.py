"""The decode engine, stepped by hand."""

import pytest

from cluster.types.messages import Cancel, DecodeGranted, Failed, FinishReason, Preempted, ReturnGrant
from tests.fakes.engines import DOOR, MARGIN_S, TIMEOUT_S, Rig, make_request
from tests.fakes.relay import Relay


@pytest.fixture
def rig():
    return Rig(decode_blocks=10)


@pytest.fixture
def relay(rig):
    relay = Relay(rig)
    yield relay
    for request_id in relay.stories:
        relay.land(request_id)
    relay.play(20)
    rig.clock.at += TIMEOUT_S + MARGIN_S
    relay.play(5)
    rig.audit()


def ask_decode(rig, relay):
    """Prefill has blocks for everybody who was started; decode hears of it and of nothing else."""
    while relay.to_worker["prefill"]:
        relay.send_one("prefill")
    rig.prefill.step()
    while rig.prefill.said:
        relay.hear_one("prefill")
    while relay.to_worker["decode"]:
        relay.send_one("decode")


def granted(rig):
    return [m for m in rig.decode.said if isinstance(m, DecodeGranted)]


def test_a_small_pool_serves_everybody(rig, relay):
    for i in range(8):
        relay.start(make_request(f"r{i}", 9 + i, max_tokens=5))
        rig.clock.at += 0.01
    relay.play(200)
    assert [relay.stories[f"r{i}"].tokens for i in range(8)] == [[50, 51, 52, 53, 54]] * 8
    assert len(rig.ended) == len(set(rig.ended)) and {f"r{i}" for i in range(8)} <= set(rig.ended)


def test_nobody_overtakes_a_large_request(rig, relay):
    for request_id, num_tokens in (("a", 20), ("large", 30), ("small", 3)):
        relay.start(make_request(request_id, num_tokens))
        ask_decode(rig, relay)
        rig.clock.at += 0.1
    rig.turn(2)
    assert [message.request_id for message in granted(rig)] == ["a"]


def test_a_cancelled_grant_keeps_its_blocks_until_the_writer_has_spoken(rig, relay):
    relay.start(make_request("r", 20))
    ask_decode(rig, relay)
    rig.turn()
    rig.receive("decode", Cancel("r"))
    rig.turn(3)
    assert rig.pools["decode"].num_referenced > 0 and rig.ended == []
    rig.receive("decode", ReturnGrant(granted(rig)[0].grant.lease_id))
    rig.turn(2)
    assert rig.pools["decode"].num_referenced == 0 and rig.ended == ["r"]
    rig.decode.said.clear()


def test_kv_that_does_not_come_ends_the_request_by_name_and_its_blocks_with_the_lease(rig, relay):
    relay.start(make_request("r", 20))
    ask_decode(rig, relay)
    rig.turn()
    relay.to_worker["prefill"].clear()
    rig.clock.at += TIMEOUT_S
    rig.turn()
    (failed,) = [m for m in rig.decode.said if isinstance(m, Failed)]
    assert "the prompt's KV cache" in failed.error.message
    assert rig.pools["decode"].num_referenced > 0
    rig.clock.at += MARGIN_S
    rig.turn(2)
    assert rig.pools["decode"].num_referenced == 0
    rig.decode.said.clear()


@pytest.mark.parametrize("num_rounds", range(8))
@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_leaving_at_any_moment_ends_the_request_once(rig, relay, num_rounds, how):
    relay.start(make_request("r", 12, max_tokens=5))
    relay.play(num_rounds)
    if how == "drop":
        for worker in rig.workers.values():
            worker.tell(worker.engine.drop_door, DOOR)
    relay.land("r")
    relay.play(10)
    rig.clock.at += TIMEOUT_S + MARGIN_S
    relay.play(3)
    assert rig.ended == (["r"] if num_rounds > 0 else [])  # before that decode has not heard of it


def test_a_stop_token_ends_the_answer(rig, relay):
    relay.start(make_request("r", 12, max_tokens=9, stop=(52,)))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51, 52]
    assert relay.stories["r"].finish_reason is FinishReason.STOP


def test_the_newest_gives_way_when_blocks_run_out_and_everybody_gets_his_whole_answer(rig, relay):
    for i in range(3):  # 3 × (2 prompt blocks + 5 of the answer) do not fit into 10
        relay.start(make_request(f"r{i}", 6, max_tokens=20))
    relay.play(300)
    assert rig.decode.engine.num_preempted > 0
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


def test_nothing_is_run_for_a_request_that_gave_way_in_its_own_turn(rig, relay):
    """Two rows fill a step, so each request runs alone, and the newer one asks for the last blocks."""
    runner, sizes = rig.decode.engine._runner, []
    run = runner.run
    runner.run = lambda batch: sizes.append(len(batch)) or run(batch)
    relay.start(make_request("old", 6, max_tokens=12, num_choices=2))
    rig.clock.at += 0.1
    relay.start(make_request("new", 6, max_tokens=12, num_choices=2))
    relay.play(200)
    assert rig.decode.engine.num_preempted > 0
    assert set(sizes) == {1, 2} and relay.stories["new"].is_over


def test_choices_share_the_prompt_and_each_has_its_own_answer(rig, relay):
    story = relay.start(make_request("r", 8, max_tokens=5, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 2 + 3  # two full blocks shared, the third one copied
    relay.play()
    assert [line.tokens for line in story.lines] == [[50, 51, 52, 53, 54]] * 3


def test_a_choice_that_is_cancelled_leaves_the_others_alone(rig, relay):
    story = relay.start(make_request("r", 6, max_tokens=8, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    rig.receive("decode", Cancel("r", 1))
    relay.play(1)
    assert rig.decode.engine.load().num_queued_units == 2
    relay.play()
    assert [len(line.tokens) for line in story.lines][::2] == [8, 8]
    assert len(story.lines[1].tokens) < 8 and rig.decode.engine.load().num_running == 0
    relay.land("r")


def test_choices_are_preempted_and_resumed_one_by_one(rig, relay):
    first = relay.start(make_request("a", 6, max_tokens=20))
    rig.clock.at += 0.1
    story = relay.start(make_request("r", 6, max_tokens=12, num_choices=2))
    relay.play(300)
    assert rig.decode.engine.num_preempted > 0
    assert first.tokens == list(range(50, 70))
    assert [line.tokens for line in story.lines] == [list(range(50, 62))] * 2


def test_a_companion_has_kv_of_its_own_and_its_request_is_counted_with_it(rig, relay):
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


def test_the_engine_does_not_sleep_on_blocks_that_the_last_runner_has_freed(rig, relay):
    """A step that ends its only request says that it has more to do, because somebody may wait for the blocks."""
    engine, waits = rig.decode.engine, []
    step = engine.step
    engine.step = lambda: waits.append(step())
    relay.start(make_request("r", 8, max_tokens=2))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51]
    assert waits.count(0) == 1  # the one step in which it ran, and ended
