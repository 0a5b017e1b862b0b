"""Bugs that histories have found, each with its seed and, where it says more, a small case of its own."""

from __future__ import annotations

from random import Random
from typing import Any

from cluster.engine.features import FeatureStore
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.members import Role
from cluster.types.messages import Cancel, EncodeTarget, StartDecode, StartEncode
from tests.fakes.engines import FEATURE_LAYOUT, Rig
from tests.fakes.kv_rows import BLOCK_SIZE
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request
from tests.histories.network import Network
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread
from tests.histories.world import Shape, World
from tests.unit.engine.feature_parts import FakeMover


def test_room_of_an_item_in_the_cached_prefix_is_given_back_at_once() -> None:
    """The second item needs it. Before, nothing could be computed until the deadline, here and behind."""
    rig = Rig(feature_blocks=6, kv_blocks=40)
    relay = Relay(rig)
    first, second = make_item("a", 15), make_item("b", 15)  # four blocks of embeddings each
    relay.start(make_request("alone", 1, [first]), [first])
    relay.play()
    both = relay.start(make_request("both", 1, [first, second]), [first, second])
    behind = relay.start(make_request("behind", 4, [second]), [second])
    relay.play()
    assert both.error is None and both.is_over and behind.is_over
    relay.finish()


def test_room_that_is_not_granted_yet_is_free_when_its_last_consumer_leaves() -> None:
    """The copy has moved out of the room of a lease whose owner was cancelled, and is not wanted yet. Before,
    it took that lease for its own, and its blocks were held for ever (seed 481)."""
    transfer_engine: Any = FakeMover()
    pool = BlockPool(4, BLOCK_SIZE)
    store = FeatureStore(BlockMemory(FEATURE_LAYOUT, 4), pool, transfer_engine)
    granted: list[Any] = []
    store.reserve(("first", 0), "a", 4, 10.0, granted.append)
    lease_id = granted[0].grant.lease_id
    store.reserve(("second", 0), "a", 4, 10.0, granted.append, is_wanted=False)
    store.release(("first", 0), has_ended=True)
    store.release(("second", 0), has_ended=True)
    store.close_lease(lease_id, completed=False)
    assert pool.num_referenced == 0


def test_an_item_that_is_asked_for_again_at_its_own_worker_does_not_stay_there() -> None:
    """The encoder's thread is behind: it is asked for the item, told that others bring it, asked again and
    told of the room, all before it has read the first. Before, the room was there for the first, and the
    second waited for room until its deadline."""
    world = World(Random(1), Shape((Role.WHOLE,)))
    with world.lease_ids():
        scheduler, (worker,) = world.scheduler, world.workers.values()
        scheduler.run_until(0.1)
        item = make_item("a", 3)
        world.clients.submit(world.doors[0], make_request("first", 1, [item]), [item])
        scheduler.run_until(1.0)
        encoder = worker.encoder
        assert encoder is not None and item.media_hash in encoder.cache
        request = make_request("second", 5, [item])
        thread = SimulatedThread(SimulatedProcess("far"), "loop")
        _, far_door = world.network.connect(thread, worker.event_loop)
        worker.listener.on_connect(far_door)
        worker.listener.on_message(far_door, StartDecode(request, 10.0, prefills=True))
        (grant,) = worker.parts.feature_transfer_engine.open_grants.values()
        start = StartEncode("second", 0, item, 10.0)
        for message in (start, Cancel("second", item_idx=0), start, EncodeTarget("second", 0, grant)):
            worker.listener.on_message(far_door, message)
        scheduler.run_until(2.0)
    assert len(encoder.engine.deliveries) == 0
    assert worker.ended[-1] == "second"


def test_messages_keep_their_order_through_a_partition_and_a_stop() -> None:
    """Of the tool itself: what a partition held back came after what arrived while the process was stopped
    (seed 313883)."""
    scheduler = Scheduler()
    network = Network(scheduler, Random(0))
    near, far = (SimulatedThread(SimulatedProcess(name), "loop") for name in ("door", "worker"))
    here, there = network.connect(near, far)
    heard: list[str] = []
    there.on_message = lambda _, message: heard.append(message.request_id)
    network.part(near.process, far.process, 1.0)
    here.send(Cancel("first"))
    scheduler.run_until(0.1)
    scheduler.stop(far.process)
    here.send(Cancel("second"))
    scheduler.run_until(2.0)
    here.send(Cancel("third"))
    scheduler.run_until(2.1)
    assert heard == []
    scheduler.resume(far.process)
    scheduler.run_until(3.0)
    assert heard == ["first", "second", "third"]
