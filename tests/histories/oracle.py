"""What must hold.

    check_budgets   after every few events: blocks, leases, admission, room for embeddings
    check_answers   in the end: every answer is a pure function of its request, every choice has one end
    check_ledgers   when everything has ended: nothing is held anywhere

Each raises AssertionError.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from cluster.types.messages import FinishReason, Pong
from tests.histories.clients import ITEMS, Line, Story
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
        _check_door(world, door)


def _check_leases(worker: SimulatedWorker) -> None:
    """The fence: blocks that a writer may write to are held, with the generation that was granted, and by one
    lease."""
    for engine in worker.transfer_engines.values():
        memory = engine.incoming
        if memory is None or not engine.open_grants:
            continue
        pool = worker.pool_of(memory)
        seen: set[int] = set()
        filled_here = worker.language.features.filled_here if worker.language is not None else set()
        for grant in engine.open_grants.values():
            if grant.lease_id in filled_here:
                continue
            assert pool.generations(grant.block_ids) == grant.generations, f"{grant} has other generations"
            pool.share(grant.block_ids)  # raises if one of them is not held
            pool.free(grant.block_ids)
            for block_id, generation in zip(grant.block_ids, grant.generations, strict=True):
                assert block_id not in seen, f"block {block_id} is under two leases"
                seen.add(block_id)
                first = worker.granted.setdefault((memory, block_id, generation), grant.lease_id)
                # Room of an item that the worker was to encode itself may go to another encoder
                assert first == grant.lease_id or worker.encoder is not None, (
                    f"generation {generation} of block {block_id} was granted before, by {first}"
                )


def _check_doors_of(worker: SimulatedWorker) -> None:
    """Nothing goes on for a door whose connection has ended, once the engine has been told."""
    for seat in worker.parts.seats:
        if seat.loop.thread.is_busy or seat.loop.num_calls:
            continue
        gone = [
            name for door, name, *_ in worker.works_of(seat.engine) if door not in worker.shell.connections
        ]
        assert not gone, f"{worker.name} goes on with {gone} of a door that is gone"


def _check_worker(worker: SimulatedWorker) -> None:
    _check_doors_of(worker)
    if worker.encoder is not None:
        limits, engine = worker.host.sizes.encoder_limits, worker.encoder.engine
        load = engine.load()
        is_alone = load.num_running <= 1  # an item may always be in work
        assert is_alone or load.num_queued_units <= limits.max_queued_rows, "too many rows queued"
        assert is_alone or engine.preparation.held_bytes <= limits.max_prepared_bytes
    assert len(worker.ended) == len(set(worker.ended)), "a request has left an engine twice"


def _check_door(world: World, door: SimulatedDoor) -> None:
    flow, view = door.flow, door.cluster
    for pool in (view.encoders, view.prefills, view.decodes):
        assert (pool.sent_units >= -1e-6).all(), f"{door.name}: a charge is negative: {pool.sent_units}"
    assert view.in_flight.keys() <= flow.attempts.keys(), "an attempt that has landed is charged"
    for name, story in world.clients.stories.items():
        is_over = story.door is door and story.has_ended
        assert not (is_over and door.admission.is_admitted(name)), f"{name} has ended and is admitted"


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
        assert worker.process.is_dead or not worker.shell.connections, (
            f"{worker.name} has drained, and is connected"
        )


def _check_idle_door(door: SimulatedDoor) -> None:
    flow, dispatcher, view = door.flow, door.dispatcher, door.cluster
    assert flow.num_crashed == 0, "an error of the door itself"
    assert dispatcher.is_idle, f"{door.name} is not idle: {flow.num_running} run, {flow.num_waiting} wait"
    assert flow.next_timer() is None or flow.next_timer() > door.clock.now(), "a timer is overdue"
    for pool in (view.encoders, view.prefills, view.decodes):
        assert abs(pool.sent_units).max(initial=0.0) < 1e-6, f"{door.name}: charges are left"
    assert len(view.pending) == 0, "prompts are pending"
    for worker in flow.workers:
        assert worker.num_requests == 0, f"{door.name} counts {worker.num_requests} at {worker.replica_id}"


def _check_idle_worker(worker: SimulatedWorker) -> None:
    for engine in worker.engines:
        load = engine.load()
        assert load.is_idle, f"its load is {load}"
    for engine in worker.transfer_engines.values():
        assert engine.num_open == 0, "leases are open"
        agent: Any = engine.agent
        assert not agent.pending, "writes are not released"
        assert not engine.open_grants and engine.idle_s is None, "a writer is waited for"
    if worker.encoder is not None:
        _check_idle_encoder(worker.encoder)
    if worker.language is not None:
        _check_idle_language(worker.language)
    for seat in worker.parts.seats:
        assert not seat.flushed(), "an answer waits in the outbox"
        seat.outbox.broadcast(Pong())
        doors = {door for door, _ in seat.flushed()}
        assert doors == set(worker.shell.connections), "a door is remembered that is gone"


def _check_idle_encoder(encoder: SimulatedEncoder) -> None:
    engine = encoder.engine
    encoder.pool.check_integrity()
    assert encoder.cache.num_held_blocks == 0, "embeddings are held"
    assert encoder.cache.num_cached_blocks == encoder.pool.num_referenced
    assert len(engine.deliveries) == engine.deliveries.num_sending == engine.deliveries.file_bytes == 0
    assert len(engine.preparation) == engine.preparation.held_bytes == 0


def _check_idle_language(language: SimulatedLanguage) -> None:
    """Its load says that no request is left."""
    engine, features = language.engine, language.features
    language.pool.check_integrity()
    assert language.pool.num_referenced == 0, "KV blocks are held"
    assert engine.load().num_pool_faults == 0, "KV blocks were held by no request"
    assert not engine.requests, "requests are left"
    engine.take_targets()  # opens a lease for each grant that was left to be taken
    assert language.parts.transfer_engine.num_open == 0, "a grant was not taken"
    language.feature_pool.check_integrity()
    assert language.feature_pool.num_referenced == 0, "room for embeddings is held"
    assert not features.copies, f"embeddings are kept for {list(features.copies)}"
    assert not any(features.copies.newest((item.media_hash, item.geometry.num_tokens)) for item in ITEMS)
    assert not features.harmed_by(range(language.feature_pool.num_blocks)), "a request is remembered"
