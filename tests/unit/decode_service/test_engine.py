"""The decode engine, stepped by hand."""

import pytest

from cluster.types.messages import Cancel, DecodeGranted, Failed, FinishReason, ReturnGrant
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


def granted(rig):
    return [m for m in rig.decode.said if isinstance(m, DecodeGranted)]


def test_a_small_pool_serves_everybody_in_order(rig, relay):
    for i in range(8):
        relay.start(make_request(f"r{i}", 9 + i, max_tokens=5))
    relay.play(200)
    assert [story.tokens for story in relay.stories.values()] == [[50, 51, 52, 53, 54]] * 8
    assert rig.ended == sorted(rig.ended)


def test_nobody_overtakes_a_large_request(rig, relay):
    for request_id, num_tokens in (("a", 20), ("large", 30), ("small", 3)):
        relay.start(make_request(request_id, num_tokens))
        relay.send_one("decode")
    rig.turn(2)
    assert [message.request_id for message in granted(rig)] == ["a"]


def test_a_cancelled_grant_keeps_its_blocks_until_the_writer_has_spoken(rig, relay):
    relay.start(make_request("r", 20))
    relay.send_one("decode")
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
    relay.send_one("decode")
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
    assert rig.ended == ["r"]


def test_a_stop_token_ends_the_answer(rig, relay):
    relay.start(make_request("r", 12, max_tokens=9, stop=(52,)))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51, 52]
    assert relay.stories["r"].finish_reason is FinishReason.STOP
