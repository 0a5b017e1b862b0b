"""What must hold while time passes, seen every LOOK_EVERY_S of virtual time.

    orphaned    a worker works for a request that its door has landed, or encodes an item that its door does
                not want from it
    forgotten   a door waits for workers that know nothing of the request
    abandoned   a lease is open, and all processes can know that nothing writes to its blocks
    overdue     a request is older than all its deadlines

Messages take time, so each of the first three must be so for GRACE_S, in which nothing holds the worker or
the door up. Without these looks a leak would be seen only if nothing else, a deadline of the worker or the
lease's time for example, made up for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kv_transfer.lease.receiver import IN_FLIGHT_S
from tests.histories.doors import FIRST_TOKEN_S, REQUEST_S, SimulatedDoor
from tests.histories.network import End
from tests.histories.workers import SimulatedWorker
from tests.histories.world import World

LOOK_EVERY_S = 0.5
GRACE_S = 1.5
# Until a request is admitted, until a worker joins, and then its own; clocks differ by 2 %
LONGEST_S = 1.03 * (5.0 + FIRST_TOKEN_S + REQUEST_S) + 1.0


class Lookout:
    def __init__(self, world: World):
        self._world = world
        self.is_over = False  # set: no more looks
        self._since: dict[tuple[str, ...], float] = {}  # what is wrong, and since when
        self._held_up_at = 0.0  # a process, or a connection, the last time
        world.scheduler.after(LOOK_EVERY_S, None, "", self._look)

    def _look(self) -> None:
        if self.is_over:
            return
        now = self._world.scheduler.now
        found = {*self._orphaned(), *self._forgotten(), *self._abandoned()}
        self._since = {each: self._since.get(each, now) for each in found}
        self._look_for_waiting(now)
        for each, since in self._since.items():
            assert now - since <= GRACE_S, f"{' '.join(each)} since {since:.2f}"
        self._check_overdue(now)
        self._world.scheduler.after(LOOK_EVERY_S, None, "", self._look)

    def _look_for_waiting(self, now: float) -> None:
        """A request may run out of time because a lease on room for embeddings does not end."""
        world = self._world
        for worker in world.live_workers:
            if (language := worker.language) is None:
                continue
            for lease_id in worker.open_leases:
                is_old = now > world.made_at(lease_id) + GRACE_S
                world.num_waited_for += is_old and language.is_short_of_room(lease_id)

    def _orphaned(self) -> Iterator[tuple[str, ...]]:
        for worker in self._world.live_workers:
            for name, door, request_id, item_idx in _work_of(worker):
                if self._is_held_up(worker, door) or self._is_wanted(worker, door, request_id, item_idx):
                    continue
                yield worker.name, "goes on with", name, "which its door does not want from it"

    def _is_wanted(
        self, worker: SimulatedWorker, door: SimulatedDoor, request_id: str, item_idx: int | None
    ) -> bool:
        attempt = door.flow.attempts.get(request_id)
        if attempt is None or item_idx is None:
            return attempt is not None
        state = attempt.media[item_idx]
        return state.encoder.replica_id == worker.replica_id and not state.is_shared

    def _forgotten(self) -> Iterator[tuple[str, ...]]:
        known = {
            request_id
            for worker in self._world.live_workers
            if worker.language is not None
            for request_id in worker.language.engine.requests
        }
        held_up = [worker for worker in self._world.live_workers if self._is_stuck(worker)]
        for door in self._world.doors:
            if door.process.is_stopped or held_up or self._world.network.partitions:
                continue
            for request_id in door.flow.attempts:
                if request_id not in known:
                    yield door.name, "waits for", request_id, "which its workers do not know"

    def _abandoned(self) -> Iterator[tuple[str, ...]]:
        world, doors = self._world, self._world.doors
        is_held_up = any(self._is_stuck(worker) for worker in world.live_workers)
        if is_held_up or world.network.partitions or any(door.process.is_stopped for door in doors):
            self._held_up_at = world.scheduler.now
            return
        attempts = [each for door in doors for each in door.flow.attempts.values()]
        items = [item for attempt in attempts for item in attempt.media]
        held = {item.grant.lease_id for item in items if item.grant is not None}
        for worker in world.workers.values():
            for lease_id in () if worker.process.is_dead else worker.open_leases:
                if lease_id not in held and self._is_free(lease_id):
                    yield worker.name, "keeps", lease_id, "to which nothing writes"

    def _is_free(self, lease_id: str) -> bool:
        """What a door that has ended had on its way may have arrived anywhere."""
        world, network = self._world, self._world.network
        door, writer = network.granted_to.get(lease_id), network.passed_to.get(lease_id)
        if door is not None and door.is_dead:
            return False
        if writer is not None and writer.is_dead:
            known_at = max(world.ended_at[writer], self._held_up_at)  # at the latest
            has_landed = world.scheduler.now > known_at + IN_FLIGHT_S + LOOK_EVERY_S
            return world.shape.is_one_host and has_landed
        is_listed = writer is None or any(each.process is writer for each in world.workers.values())
        return is_listed and not world.was_given(lease_id)

    def _is_held_up(self, worker: SimulatedWorker, door: SimulatedDoor) -> bool:
        parted = self._world.network.is_parted(worker.process, door.process)
        return parted or door.process.is_stopped or self._is_stuck(worker)

    @staticmethod
    def _is_stuck(worker: SimulatedWorker) -> bool:
        return worker.process.is_stopped or any(seat.loop.thread.is_busy for seat in worker.parts.seats)

    def _check_overdue(self, now: float) -> None:
        for name, story in self._world.clients.stories.items():
            if story.is_over or story.door.process.num_stops:
                continue
            age_s = now - story.submitted_at
            assert age_s <= LONGEST_S, f"{name} is {age_s:.1f} s old, and has not ended"


def _work_of(worker: SimulatedWorker) -> Iterator[tuple[str, SimulatedDoor, str, int | None]]:
    """Name, door, request and item of all that the worker has in work for doors that are connected."""
    works = (work for engine in worker.engines for work in worker.works_of(engine))
    for door_id, name, request_id, item_idx in works:
        end: Any = worker.shell.connections.get(door_id)
        if isinstance(end, End) and end.is_open:
            door = _door_at(worker, end)
            if door is not None:
                yield name, door, request_id, item_idx


def _door_at(worker: SimulatedWorker, end: End) -> SimulatedDoor | None:
    world: Any = worker.host
    return next((door for door in world.doors if door.process is end.peer.process), None)
