"""Time passes where a worker does not look at its clock: inside an encoder's call, and between the look and
the write.

Whatever a former writer does then, an answer is never computed from its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from cluster.kvcache.memory import BlockMemory
from cluster.types.messages import Failed, FeatureGranted, StartPrefill, TokenEvent, Tokens
from cluster.types.transfer import Grant
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.engines import FEATURE_LAYOUT, MARGIN_S, TIMEOUT_S, Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import item_value, make_item, make_request

LATE_S = TIMEOUT_S + MARGIN_S + 1.0  # both workers' time is over then
ITEM, OTHER_ITEM = make_item("a", 8), make_item("other", 8)


class World:
    """A request whose encoder or prefill worker is late, and one that gets its blocks."""

    def __init__(self):
        self.rig = Rig(feature_blocks=2, decode_blocks=6)
        self.relay = Relay(self.rig)
        self.second_rows = BlockMemory(FEATURE_LAYOUT, 2)
        self.second_encoder = TransferEngine(
            self.rig.network.agent("second"), self.rig.clock, print, outgoing=self.second_rows
        )

    def once(self, happen: Callable[[], None]) -> Callable[[], None]:
        left = [happen]
        return lambda: left.pop()() if left else None

    def start_other(self, num_tokens: int = 3) -> None:
        """The other request takes the blocks whose lease is over; its embeddings come from the second
        encoder."""
        rig = self.rig
        rig.clock.at += LATE_S
        for _ in range(3):
            rig.prefill.step()
            rig.prefill.feature_transfer_engine.step()
        assert rig.features.num_open_leases == 0, "the first request's lease is over"
        request = make_request("other", num_tokens, [OTHER_ITEM])
        before = len(rig.prefill.said)
        rig.receive("prefill", StartPrefill(request, TIMEOUT_S))
        (granted,) = [m for m in list(rig.prefill.said)[before:] if isinstance(m, FeatureGranted)]
        for row in range(8):
            self.second_rows.segments[0][row // 4, row % 4] = item_value(OTHER_ITEM.media_hash, row)
        outgoing = self.second_encoder.open(granted.grant.received(rig.clock.now()))
        outgoing.write([0, 1], [0, 1])
        outgoing.finish(b"")
        for _ in range(2):
            self.second_encoder.step()
            rig.prefill.feature_transfer_engine.step()
        rig.prefill.inbox.run()
        assert rig.features.ready_items("other", 1) == {0}

    def run_prefill(self) -> None:
        for _ in range(6):
            self.rig.prefill.feature_transfer_engine.step()
            self.rig.prefill.step()

    def tokens(self, name: str, request_id: str) -> list[TokenEvent]:
        said = [m for m in self.rig.workers[name].said if isinstance(m, Tokens)]
        return [event for m in said for event in m.events if event.request_id == request_id]

    def failures(self, name: str, request_id: str) -> list[Failed]:
        said = self.rig.workers[name].said
        return [m for m in said if isinstance(m, Failed) and m.request_id == request_id]


@pytest.fixture
def world():
    world = World()
    yield world
    for name in world.rig.workers:
        world.rig.workers[name].tell(world.rig.workers[name].engine.drop_door, 1)
    for _ in range(4):
        world.rig.turn(5)
        world.rig.clock.at += LATE_S
    world.rig.audit()


def encode_first(world: World) -> None:
    """Until the encoder has rows and target of the first request, in one call."""
    world.relay.start(make_request("first", 3, [ITEM]), [ITEM])
    world.relay.play(1)
    for name in ("encoder", "prefill"):
        while world.relay.to_worker[name]:
            world.relay.send_one(name)
    world.rig.executor.run_one()
    world.rig.encoder.step()
    world.rig.encoder.transfer_engine.step()


def test_an_encoder_call_that_outlasts_its_grant_writes_nothing(world):
    world.rig.mid_call = world.once(world.start_other)
    encode_first(world)
    world.run_prefill()  # compares every row that it merges
    assert [event.token_ids for event in world.tokens("prefill", "other")] == [(50,)]
    assert (
        world.failures("encoder", "first")
        and world.rig.prefill.feature_transfer_engine.received.num_late == 0
    )


def stall_post(world: World, name: str, happen: Callable[[], None]) -> None:
    """The process stands still between its look at the clock and its next write."""
    agent: Any = world.rig.workers[name].transfer_engine.agent
    post, meanwhile = agent.post, world.once(happen)

    def stalled(*args):
        meanwhile()
        return post(*args)

    agent.post = stalled


def test_embeddings_that_a_stopped_encoder_writes_over_others_fail_what_waits_for_those(world):
    stall_post(world, "encoder", world.start_other)
    encode_first(world)
    world.run_prefill()
    (failed,) = world.failures("prefill", "other")
    assert "came late" in failed.error.message
    assert world.tokens("prefill", "other") == []


def test_what_was_computed_from_overwritten_embeddings_is_neither_answered_nor_kept(world):
    """They are merged after they were overwritten and before that is known."""

    def start_and_compute() -> None:
        world.start_other(num_tokens=12)
        for _ in range(2):
            world.rig.prefill.step()
        assert world.rig.features.ready_items("other", 1) == set(), "merged"
        assert world.rig.pools["prefill"].content()

    stall_post(world, "encoder", start_and_compute)
    encode_first(world)
    world.rig.prefill.feature_transfer_engine.step()
    assert world.rig.prefill.feature_transfer_engine.received.num_late == 1
    world.rig.prefill.step()
    (failed,) = world.failures("prefill", "other")
    assert "came late" in failed.error.message and world.tokens("prefill", "other") == []
    assert world.rig.pools["prefill"].content() == ()


def test_kv_that_a_stopped_prefill_worker_writes_over_others_ends_them(world):
    """The other request runs at decode, in blocks that were the first one's."""
    rig, relay = world.rig, world.relay

    def start_at_decode() -> None:
        rig.clock.at += LATE_S
        for _ in range(3):
            rig.decode.transfer_engine.step()
            rig.decode.step()
        assert rig.pools["decode"].num_referenced == 0, "the first request's lease is over"
        relay.start(make_request("other", 16, max_tokens=6), prefills_locally=True)
        relay.send_one("decode")
        for _ in range(7):
            rig.decode.step()

    stall_post(world, "prefill", start_at_decode)
    relay.start(make_request("first", 19))
    while rig.decode.transfer_engine.received.num_late == 0:
        for name in rig.workers:
            while relay.to_worker[name]:
                relay.send_one(name)
            while rig.workers[name].said:
                relay.hear_one(name)
        for worker in (rig.prefill, rig.decode):
            worker.transfer_engine.step()
            worker.step()
    relay.play(1)
    story = relay.stories["other"]
    assert story.tokens and story.error is not None and "came late" in story.error
    assert rig.decode.transfer_engine.received.num_late == 1
    relay.play(5)
    assert story.finish_reason is None


def test_a_request_in_other_blocks_than_the_late_ones_goes_on(world):
    rig, relay = world.rig, world.relay

    def pass_time() -> None:
        rig.clock.at += LATE_S
        for _ in range(3):
            rig.decode.transfer_engine.step()
            rig.decode.step()

    stall_post(world, "prefill", pass_time)
    relay.start(make_request("first", 3))
    relay.play(3)
    assert rig.decode.transfer_engine.received.num_late == 1
    with suppress(KeyError):
        relay.land("first")
    other = relay.start(make_request("other", 3))
    relay.play(20)
    assert other.error is None and other.tokens == [50, 51, 52, 53]


def test_the_room_of_an_encoder_that_its_door_has_lost_is_out_of_use_until_it_has_stopped(world):
    """It lives, and its call goes on for longer than any connection takes to be given up."""
    rig, said = world.rig, []
    rig.prefill.listeners.append(said.append)

    def grants() -> list[Grant]:
        return [message.grant for message in said if isinstance(message, FeatureGranted)]

    def lose_it() -> None:
        (grant,) = grants()
        rig.clock.at += TIMEOUT_S - 0.5
        rig.features.renew(("first", 0), grant.lease_id)
        world.run_prefill()
        assert rig.features.num_open_leases == 1, "it may still be written to"
        assert grants() == [grant]

    rig.mid_call = world.once(lose_it)
    encode_first(world)
    world.run_prefill()
    assert [event.token_ids for event in world.tokens("prefill", "first")] == [(50,)], (
        "it came in time after all"
    )
