"""What goes wrong in a history: drawn from its seed, at instants of virtual time, with an end.

Every method of `Faults` that a plan names is one kind of fault (`KINDS`). After `ends_at` nothing goes wrong
any more: every process runs, every partition is healed, and every phase has a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kv_transfer.agents.agent import PeerLostError, TransferError
from tests.histories.network import End
from tests.histories.scheduler import SimulatedProcess
from tests.histories.workers import SimulatedWorker
from tests.histories.world import World

STOPS_S = (0.05, 0.4, 1.7, 3.0, 9.0, 14.0, 14.0)
LATE_S = 14.0  # longer than the time of a lease and its margin
AWAY_S = 60.0  # longer than any deadline
# Messages at which a process dies or loses a connection
STEPS = (
    "StartPrefill", "StartDecode", "StartEncode", "EncodeTarget", "DecodeTarget", "GrantPassed",
    "ReturnGrant", "EncoderLost", "Cancel", "PrefillAdmitted", "FeatureGranted", "FeatureShared",
    "DecodeGranted", "Encoded", "Preempted", "Failed", "Tokens",
)  # fmt: skip
KINDS = {  # how often, against the others
    "cancels": 2.0,
    "cuts": 1.5,
    "kills": 1.5,
    "strikes": 1.5,
    "stops": 1.0,
    "partitions": 0.6,
    "worker partitions": 0.6,
    "transport faults": 1.0,
    "silent transport faults": 0.7,
    "lost notifications": 0.5,
    "doubled notifications": 0.5,
    "late writes": 0.8,
    "late grants": 0.4,
    "hung engines": 0.6,
    "slow networks": 0.6,
    "slow disks": 0.5,
    "drains": 0.4,
    "assignments": 0.3,
    "door kills": 0.4,
    "long losses": 0.1,
}


class Faults:
    def __init__(self, world: World, rng: Random, submit: Callable[[], None]):
        """`submit()`: one more request."""
        self.world, self.rng, self._submit = world, rng, submit
        self.counts: Counter[str] = Counter()
        self.ends_at = 0.0

    def plan(self, num_faults: int, until_s: float, focus: str = "") -> None:
        """So many faults within that time. `focus`: the only kind."""
        names = [focus] if focus else list(KINDS)
        for name in self.rng.choices(names, [KINDS[name] for name in names], k=num_faults):
            self.world.scheduler.at(
                self.rng.uniform(0.0, until_s), None, f"fault: {name}", self._happen, name
            )
        self.ends_at = until_s

    def _happen(self, name: str) -> None:
        self.counts[name] += 1
        happen: dict[str, Callable[[], None]] = {
            "cancels": self.cancel,
            "cuts": self.cut,
            "kills": self.kill_worker,
            "strikes": self.strike,
            "stops": self.stop,
            "partitions": self.part_door,
            "worker partitions": self.part_workers,
            "transport faults": self.break_transport,
            "silent transport faults": self.break_transport_silently,
            "lost notifications": self.lose_notification,
            "doubled notifications": self.double_notification,
            "late writes": self.stall_write,
            "late grants": self.hold_grant,
            "hung engines": self.hang,
            "slow networks": self.slow_network,
            "slow disks": self.slow_disk,
            "drains": self.drain,
            "assignments": self.assign,
            "door kills": self.kill_door,
            "long losses": self.lose_for_long,
        }
        happen[name]()

    def _lasts(self, seconds: float) -> None:
        self.ends_at = max(self.ends_at, self.world.scheduler.now + seconds)

    # Kinds

    def cancel(self) -> None:
        open_ = [story for story in self.world.clients.stories.values() if not story.is_over]
        if open_:
            story = self.rng.choice(open_)
            whole = range(len(story.lines))
            for choice_idx in whole if self.rng.random() < 0.7 else [self.rng.choice(whole)]:
                story.door.later(0.0, self.world.clients.leave, story, choice_idx)

    def cut(self) -> None:
        ends = [end for end in self.world.network.ends if end.is_open]
        if ends:
            self.world.network.cut(self.rng.choice(ends), at_once=self.rng.random() < 0.5)

    def kill_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._kill(worker, self.rng.choice([0.02, 0.3, 2.0]))

    def lose_for_long(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._kill(worker, AWAY_S)

    def _kill(self, worker: SimulatedWorker, away_s: float) -> None:
        self.world.kill(worker.process)
        self.world.replace_later(worker, away_s, is_same_name=self.rng.random() < 0.3)
        self._lasts(away_s + 0.1)

    def strike(self) -> None:
        """A worker dies, or loses a connection, right after the next message of one kind has arrived."""
        self.world.network.when_arrived[self.rng.choice(STEPS)] = self._strike

    def _strike(self, end: End, _: Any) -> None:
        act = self._kill_end if self.rng.random() < 0.7 else self._cut_end
        delay_s = self.rng.choice([0.0, 0.0, 0.001, 0.004, 0.02])
        self.world.scheduler.after(delay_s, None, "fault: it strikes", act, end)

    def _cut_end(self, end: End) -> None:
        if end.is_open:
            self.counts["cuts"] += 1
            self.world.network.cut(end, at_once=self.rng.random() < 0.5)

    def _kill_end(self, end: End) -> None:
        """The worker of the two."""
        both = (end.process, end.peer.process)
        worker = next((each for each in self.world.workers.values() if each.process in both), None)
        if worker is not None and not worker.process.is_dead:
            self.counts["kills"] += 1
            self._kill(worker, self.rng.choice([0.02, 0.3, 2.0]))

    def kill_door(self) -> None:
        if self.world.doors:
            door = self.rng.choice(self.world.doors)
            self.world.kill(door.process)
            self.world.scheduler.after(0.1, None, "", self.world.start_door, door.name.partition("@")[0])
            self._lasts(0.2)

    def stop(self) -> None:
        process, seconds = self._process(), self.rng.choice(STOPS_S)
        if process is not None:
            self.world.stop_for(process, seconds)
            self._more_until(seconds)
            self._lasts(seconds)

    def part_door(self) -> None:
        worker, seconds = self._worker(), self.rng.choice([0.1, 1.0, 4.0, 8.0])
        if worker is not None and self.world.doors:
            self.world.network.part(self.rng.choice(self.world.doors).process, worker.process, seconds)
            self._lasts(seconds)

    def part_workers(self) -> None:
        one, other, seconds = self._worker(), self._worker(), self.rng.choice([0.1, 1.0, 8.0, 14.0])
        if one is not None and other is not None and one is not other:
            self.world.network.part(one.process, other.process, seconds)
            self._lasts(seconds)

    def break_transport(self) -> None:
        """The writer can say that it has stopped, so that its lease ends."""
        self.world.transfers.faults.failing[self.rng.choice(["connect", "notifications"])] = TransferError

    def break_transport_silently(self) -> None:
        """It cannot, or bytes may still land: the lease ends by its time."""
        verb = self.rng.choice(["connect", "post", "poll", "notify"])
        errors = {"notify": [TransferError], "connect": [PeerLostError]}
        error = self.rng.choice(errors.get(verb, [TransferError, PeerLostError]))
        self.world.transfers.faults.failing[verb] = error

    def lose_notification(self) -> None:
        self.world.transfers.faults.notifications.append("lost")

    def double_notification(self) -> None:
        self.world.transfers.faults.notifications.append("doubled")

    def stall_write(self) -> None:
        """Of a worker that has something to write, if there is one."""
        worker = self._writer()
        if worker is not None:
            self.world.transfers.faults.stalls[worker.process] = LATE_S
            self._more_until(LATE_S)
            self._lasts(LATE_S + 1.0)

    def hang(self) -> None:
        """A step of one engine lasts long; the other threads of its process go on."""
        worker, seconds = self._writer(), self.rng.choice([0.5, 3.0, 13.0, 13.0])
        if worker is not None:
            self.world.hangs[worker.process] = seconds
            self._lasts(seconds + 0.5)

    def hold_grant(self) -> None:
        """The next grant is on its way for long. Its door stands still from then on, so it calls nothing off,
        and the writer's next step ends at about the time when the owner takes the blocks back."""
        kind = self.rng.choice(["EncodeTarget", "DecodeTarget"])
        self.world.network.when_sent[kind] = self._hold_grant

    def _hold_grant(self, end: End, message: Any) -> None:
        travel_s = self.rng.choice([0.02, 0.4, 1.5])
        end.arrives_at = max(end.arrives_at, self.world.scheduler.now + travel_s)
        after_s = self.rng.choice([self.rng.uniform(-0.1, travel_s), self.rng.uniform(0.0, 4.0)])
        ends_at = self.world.made_at(message.grant.lease_id) + message.grant.ttl_s + after_s
        seconds = ends_at - self.world.scheduler.now
        self.world.hangs[end.process] = seconds
        self.world.stop_for(end.peer.process, seconds + 0.5)
        self._lasts(seconds + 1.0)

    def _more_until(self, seconds: float) -> None:
        """Requests that take the blocks which others have lost by then."""
        for _ in range(6):
            self.world.scheduler.after(seconds - 0.06 * self.rng.random(), None, "", self._submit)

    def slow_network(self) -> None:
        network, rng = self.world.network, self.rng
        normal, seconds = network.delay_s, rng.choice([0.2, 1.0])
        network.delay_s = lambda: rng.choice([0.001, 0.02, 0.3])
        self.world.scheduler.after(seconds, None, "", setattr, network, "delay_s", normal)
        self._lasts(seconds)

    def slow_disk(self) -> None:
        """Of the second tier, and where media are prepared."""
        world, rng = self.world, self.rng
        normal = world.slow_s
        world.slow_s = lambda: rng.choice([0.01, 0.2, 2.0])
        world.scheduler.after(1.0, None, "", setattr, world, "slow_s", normal)
        self._lasts(3.0)

    def drain(self) -> None:
        """Serve lists a worker no more; another one of its role takes its place."""
        worker = self._worker()
        if worker is not None:
            self.world.drain(worker)
            self._lasts(1.0)

    def assign(self) -> None:
        """A worker of several phases is told to take new requests for some of them only."""
        worker = self._worker()
        if worker is not None and len(worker.role.phases) > 1:
            phases = sorted(worker.role.phases)
            some = self.rng.sample(phases, self.rng.randint(1, len(phases)))
            worker.soon(worker.shell.assign, some)
            self.world.scheduler.after(
                self.rng.choice([0.02, 0.2]), worker.event_loop, "", worker.shell.assign, phases
            )

    # Whom

    def _worker(self) -> SimulatedWorker | None:
        live = [worker for worker in self.world.workers.values() if not worker.process.is_dead]
        return self.rng.choice(live) if live else None

    def _writer(self) -> SimulatedWorker | None:
        """One that sends embeddings or KV; that has something to write, if there is one."""
        writers = [
            worker for worker in self.world.live_workers if worker.role.encodes or worker.role.prefills
        ]
        busy = [worker for worker in writers if any(e.num_open for e in worker.transfer_engines.values())]
        return self.rng.choice(busy or writers) if writers else None

    def _process(self) -> SimulatedProcess | None:
        workers = [worker.process for worker in self.world.workers.values()]
        processes = [*workers, *(door.process for door in self.world.doors)]
        live = [process for process in processes if not process.is_dead and not process.is_stopped]
        return self.rng.choice(live) if live else None

    def clear(self) -> None:
        """What is armed and has not happened does not happen any more."""
        faults = self.world.transfers.faults
        faults.failing.clear()
        faults.notifications.clear()
        faults.stalls.clear()
        self.world.hangs.clear()
        self.world.network.when_sent.clear()
        self.world.network.when_arrived.clear()
