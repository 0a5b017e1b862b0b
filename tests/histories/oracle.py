"""What must hold.

    check_budgets   after every few events: blocks, leases, admission, room for embeddings
    check_answers   in the end: every answer is a pure function of its request, every choice has one end
    check_ledgers   when everything has ended: nothing is held anywhere

Each raises AssertionError.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from cluster.types.messages import FinishReason
from encoder_service.engine import EncoderEngine
from tests.histories.clients import Line, Story
from tests.histories.doors import SimulatedDoor
from tests.histories.model import answer
from tests.histories.workers import SimulatedEncoder, SimulatedLanguage, SimulatedWorker
from tests.histories.world import World

FORGET_S = 3700.0  # by then what is remembered for a time is forgotten


def check_budgets(world: World) -> None:
    for worker in world.live_workers:
        _check_leases(worker)
        _check_worker(worker)
    for door in world.doors:
        _check_door(door)


def _check_leases(worker: SimulatedWorker) -> None:
    """The fence: blocks that a writer may write to are held, with the generation that was granted, and by one
    lease."""
    for engine in worker.transfer_engines.values():
        receiver = engine._receiver
        if receiver is None or not receiver._leases:
            continue
        pool = worker.pool_of(receiver._incoming.memory)
        seen: set[int] = set()
        for lease in receiver._leases.values():
            grant = lease.grant
            for block_id, generation in zip(grant.block_ids, grant.generations, strict=True):
                assert pool._num_references[block_id] > 0, (
                    f"block {block_id} under {grant.lease_id} is not held"
                )
                assert pool._generations[block_id] == generation, f"block {block_id} has another generation"
                assert block_id not in seen, f"block {block_id} is under two leases"
                seen.add(block_id)
                content = receiver._incoming.memory, block_id, generation
                first = worker.granted.setdefault(content, lease.lease_id)
                # Room of an item that the worker was to encode itself may go to another encoder
                assert first == lease.lease_id or worker.encoder is not None, (
                    f"generation {generation} of block {block_id} was granted before, by {first}"
                )


def _check_doors_of(worker: SimulatedWorker) -> None:
    """Nothing goes on for a door whose connection has ended, once the engine has been told."""
    for seat in worker.parts._seats:
        if seat.loop.thread.is_busy or seat.loop.num_calls:
            continue
        doors, engine = set(worker.shell._connections), seat.engine
        requests = engine._deliveries._deliveries if isinstance(engine, EncoderEngine) else engine._requests
        gone = [
            name
            for name, request in requests.items()
            if request.door not in doors and not getattr(request, "is_closing", False)
        ]
        assert not gone, f"{worker.name} goes on with {gone} of a door that is gone"


def _check_worker(worker: SimulatedWorker) -> None:
    _check_doors_of(worker)
    if worker.encoder is not None:
        limits, engine = worker.host.sizes.encoder_limits, worker.encoder.engine
        num_items = len(engine._items)
        assert num_items <= 1 or engine._queued_rows.total <= limits.max_queued_rows, "too many rows queued"
        assert num_items <= 1 or engine._preparation.held_bytes <= limits.max_prepared_bytes
    assert len(worker.ended) == len(set(worker.ended)), "a request has left an engine twice"


def _check_door(door: SimulatedDoor) -> None:
    flow, view = door.flow, door.cluster
    for pool in (view.encoders, view.prefills, view.decodes):
        assert (pool.sent_units >= -1e-6).all(), f"{door.name}: a charge is negative: {pool.sent_units}"
    assert view._in_flight.keys() <= flow._attempts._attempts.keys(), "an attempt that has landed is charged"
    known = flow._clients.keys()
    assert door.admission._admitted._holdings.keys() <= known, "an ended request is admitted"


def check_answers(world: World, allowed: tuple[type[Exception], ...]) -> Counter[str]:
    """`allowed`: errors that clients may have been told."""
    counts: Counter[str] = Counter()
    for name, story in world.clients.stories.items():
        for idx, line in enumerate(story.lines):
            try:
                counts[_outcome(story, idx, line, allowed)] += 1
            except AssertionError as error:
                raise AssertionError(f"{name}, choice {idx}: {error}") from None
    return counts


def _outcome(story: Story, idx: int, line: Line, allowed: tuple[type[Exception], ...]) -> str:
    wanted = answer(story.request, idx)
    if story.is_tainted:
        return "tainted"
    assert line.tokens == wanted[: len(line.tokens)], f"wrong tokens {line.tokens}, not {wanted}"
    assert line.num_ends <= 1, f"{line.num_ends} ends"
    if line.finish_reason is not None:
        assert line.tokens == wanted, f"it ends after {len(line.tokens)} of {len(wanted)} tokens"
        is_stop = wanted[-1] in story.request.stop.stop_token_ids
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        assert line.finish_reason is reason, f"it ends with {line.finish_reason}"
        return "right"
    if line.has_left:
        return "cancelled"
    if story.is_cut:
        return "door lost"
    assert line.error is not None, "it has not ended"
    assert isinstance(line.error, allowed), f"{type(line.error).__name__}: {line.error}"
    return f"failed: {type(line.error).__name__}"


def check_ledgers(world: World) -> None:
    for door in world.doors:
        _check_idle_door(door)
    for worker in world.live_workers:
        try:
            _check_idle_worker(worker)
        except AssertionError as error:
            raise AssertionError(f"{worker.name}: {error}") from error

    for worker in world.draining:
        assert worker.process.is_dead or not worker.shell._doors, (
            f"{worker.name} has drained, and is connected"
        )


def _check_idle_door(door: SimulatedDoor) -> None:
    flow, dispatcher, view = door.flow, door.dispatcher, door.cluster
    assert flow.num_crashed == 0, "an error of the door itself"
    assert flow.is_idle, f"{door.name} is not idle: {_held_by(flow)}"
    _check_empty(door.name, flow, "_waiting", "_unplaced")
    _check_empty(door.name, dispatcher, "_unread", "_streams")
    _check_empty(door.name, flow._attempts._media, "_suspects", "_held")
    assert flow.next_timer() is None or flow.next_timer() > door.clock.now(), "a timer is overdue"
    for pool in (view.encoders, view.prefills, view.decodes):
        assert abs(pool.sent_units).max(initial=0.0) < 1e-6, f"{door.name}: charges are left"
    assert len(view.pending) == 0, "prompts are pending"
    for worker in flow.workers:
        assert worker.num_requests == 0, f"{door.name} counts {worker.num_requests} at {worker.replica_id}"


def _held_by(flow: Any) -> str:
    return (
        f"clients {list(flow._clients)}, attempts {list(flow._attempts._attempts)}, "
        f"admission {flow._admission.is_idle}, charges {flow._cluster.is_idle}"
    )


def _check_idle_worker(worker: SimulatedWorker) -> None:
    for engine in worker.engines:
        load = engine.load()
        assert load.is_idle, f"its load is {load}"
    for engine in worker.transfer_engines.values():
        assert engine.num_open == 0, "leases are open"
        agent: Any = engine.agent
        assert not agent.pending, "writes are not released"
        if engine._receiver is not None:
            _check_empty(worker.name, engine._receiver, "_leases", "_taken_back", "_events")
    if worker.encoder is not None:
        _check_idle_encoder(worker.encoder)
    if worker.language is not None:
        _check_idle_language(worker.name, worker.language)
    for seat in worker.parts._seats:
        _check_empty(worker.name, seat.outbox, "_messages", "_events")
        assert len(seat.outbox._doors) == len(worker.shell._doors), "a door is remembered that is gone"


def _check_idle_encoder(encoder: SimulatedEncoder) -> None:
    engine = encoder.engine
    encoder.pool.check_integrity()
    assert encoder.cache.num_held_blocks == 0, "embeddings are held"
    assert encoder.cache.num_cached_blocks == encoder.pool.num_referenced
    _check_empty("encoder", engine, "_items")
    _check_empty("deliveries", engine._deliveries, "_deliveries", "_files", "_by_lease")
    _check_empty("preparation", engine._preparation, "_waiting", "_unwanted")
    assert engine._preparation.held_bytes == 0 and engine._queued_rows.total == 0


def _check_idle_language(name: str, language: SimulatedLanguage) -> None:
    engine = language._engine
    language.pool.check_integrity()
    assert language.pool.num_referenced == 0, "KV blocks are held"
    assert engine.load().num_pool_faults == 0, "KV blocks were held by no request"
    _check_empty(name, engine, "_computing")
    assert not engine._requests, "requests are left"
    _check_empty(name, engine._kv_output, "_offered", "_by_lease")
    _check_empty(name, engine._kv_input, "_by_lease")
    _check_empty(name, engine._answers, "running")
    language.feature_pool.check_integrity()
    assert language.feature_pool.num_referenced == 0, "room for embeddings is held"
    copies, rooms = language._features._copies, language._features._rooms
    _check_empty("copies of embeddings", copies, "_copies", "_by_name", "_merged")
    _check_empty("room for embeddings", rooms, "_queued", "_by_lease", "_filled_here")


def _check_empty(name: str, owner: Any, *fields: str) -> None:
    for field in fields:
        content = getattr(owner, field)
        assert not content, f"{name} still has {field}: {content}"
