"""Answers to prompts whose KV arrives, stepped by hand: admission, grants, the ends of requests and doors."""

import msgspec
import pytest

from cluster.engine.state import LanguagePhase
from cluster.types.messages import (
    Cancel,
    DecodeGranted,
    Failed,
    FinishReason,
    ReturnGrant,
    StartDecode,
)  # fmt: skip
from tests.fakes.engines import DOOR, MARGIN_S, TIMEOUT_S
from tests.fakes.requests import make_item, make_request
from tests.histories.history import cut_ends


def ask_decode(rig, relay):
    """Prefill has blocks for every request that was started; decode hears of that and of nothing else."""
    while relay.to_worker["prefill"]:
        relay.send_one("prefill")
    rig.prefill.step()
    while rig.prefill.said:
        relay.hear_one("prefill")
    while relay.to_worker["decode"]:
        relay.send_one("decode")
    rig.decode.inbox.run()


def granted(rig):
    return [m for m in rig.decode.said if isinstance(m, DecodeGranted)]


def test_a_small_pool_serves_all_requests(rig, relay):
    for i in range(8):
        relay.start(make_request(f"r{i}", 9 + i, max_tokens=5))
        rig.clock.at += 0.01
    relay.play(200)
    assert [relay.stories[f"r{i}"].tokens for i in range(8)] == [[50, 51, 52, 53, 54]] * 8
    assert len(rig.ended) == len(set(rig.ended)) and {f"r{i}" for i in range(8)} <= set(rig.ended)


def test_no_request_overtakes_a_large_one(rig, relay):
    for request_id, num_tokens in (("a", 20), ("large", 30), ("small", 3)):
        relay.start(make_request(request_id, num_tokens))
        ask_decode(rig, relay)
        rig.clock.at += 0.1
    rig.turn(2)
    assert [message.request_id for message in granted(rig)] == ["a"]


def test_a_better_class_goes_first_and_media_no_sooner_than_text(rig, relay):
    for request_id, priority, items in (("text", 1, ()), ("media", 1, [make_item("a", 1)]), ("best", 0, ())):
        request = make_request(request_id, 24 - len(items), items)  # 7 blocks of 10
        relay.start(msgspec.structs.replace(request, priority=priority), items)
        ask_decode(rig, relay)
        rig.clock.at += 0.1
    order = []
    for _ in range(9):
        rig.turn()
        for message in granted(rig):
            order.append(message.request_id)
            rig.receive("decode", Cancel(message.request_id))
            rig.receive("decode", ReturnGrant(message.grant.lease_id))
        rig.decode.said.clear()
    assert order == ["best", "text", "media"]


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


def test_the_engine_does_not_sleep_on_blocks_that_the_last_runner_has_freed(rig, relay):
    """A step that ends its only request says that it has more to do, because a request may wait for the
    blocks."""
    engine, waits = rig.decode.engine, []
    step = engine.step
    engine.step = lambda: waits.append(step())
    relay.start(make_request("r", 8, max_tokens=2))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51]
    assert waits.count(0) == 1  # the one step in which it ran, and ended


def test_a_lost_door_takes_all_its_requests_along_and_no_other_doors(rig, relay):
    for n in range(3):
        relay.start(make_request(f"r{n}", 3, max_tokens=9), prefills_locally=True)
    relay.play(2)
    other = StartDecode(make_request("other", 3, max_tokens=9), TIMEOUT_S, prefills=True)
    rig.decode.tell(rig.decode.engine.start, DOOR + 1, other, rig.clock.at)
    relay.play(2)
    rig.decode.tell(rig.decode.engine.drop_door, DOOR)
    rig.decode.step()
    assert list(rig.decode.engine.requests) == ["other"] and sorted(rig.ended) == ["r0", "r1", "r2"]
    rig.decode.tell(rig.decode.engine.drop_door, DOOR + 1)
    rig.decode.step()
    assert rig.decode.engine.load().is_idle


def test_an_answer_does_not_keep_the_logits_of_a_prompt_whose_end_was_computed_here(rig, relay):
    """The sender of the KV has drawn the first token. The one row would keep the logits of a whole step."""
    with cut_ends(2):
        story = relay.start(make_request("r", 14, max_tokens=6))
        for _ in range(100):
            relay.play(1)
            request = rig.decode.engine.requests.get("r")
            if request is not None and request.phase is LanguagePhase.RUNNING:
                break
        assert request is not None
        (choice,) = request.choices
        assert [sequence.last_logits for sequence in choice.sequences] == [None]
        relay.play()
    assert story.tokens == [50, 51, 52, 53, 54, 55]
