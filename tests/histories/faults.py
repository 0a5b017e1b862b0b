"""What goes wrong in a history: drawn from its seed, at instants of virtual time, with an end.

Every method of `Faults` that a plan names is one kind of fault. After `ends_at` nothing goes wrong any more:
every process runs, every partition is healed, and every phase has a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from kv_transfer.agents.agent import PeerLostError, TransferError
from tests.histories.scheduler import SimulatedProcess
from tests.histories.workers import SimulatedWorker
from tests.histories.world import World

FOCUSED = 0.25  # of the histories
STOPS_S = (0.05, 0.4, 1.7, 3.0, 9.0, 14.0, 14.0)
LATE_S = 14.0  # longer than the time of a lease and its margin


class Faults:
    def __init__(self, world: World, rng: Random, submit: Callable[[], None]):
        """`submit()`: one more request."""
        self.world, self.rng, self._submit = world, rng, submit
        self.counts: Counter[str] = Counter()
        self.ends_at = 0.0
        self.kinds: dict[str, tuple[float, Callable[[], None]]] = {
            "cancels": (2.0, self.cancel),
            "cuts": (1.5, self.cut),
            "kills": (1.5, self.kill_worker),
            "stops": (1.0, self.stop),
            "partitions": (0.6, self.part_door),
            "worker partitions": (0.6, self.part_workers),
            "transport faults": (1.0, self.break_transport),
            "silent transport faults": (0.7, self.break_transport_silently),
            "lost notifications": (0.5, self.lose_notification),
            "doubled notifications": (0.5, self.double_notification),
            "late writes": (0.8, self.stall_write),
            "hung engines": (0.6, self.hang),
            "slow networks": (0.6, self.slow_network),
            "slow disks": (0.5, self.slow_disk),
            "drains": (0.4, self.drain),
            "door kills": (0.4, self.kill_door),
        }

    def plan(self, num_faults: int, until_s: float, focus: str = "") -> None:
        """So many faults within that time. `focus`: the only kind."""
        names = list(self.kinds)
        if self.rng.random() < FOCUSED:  # one kind alone, many times
            names = [self.rng.choice(names)]
        names = [focus] if focus else names
        weights = [self.kinds[name][0] for name in names]
        for name in self.rng.choices(names, weights, k=num_faults):
            self.world.scheduler.at(
                self.rng.uniform(0.0, until_s), None, f"fault: {name}", self._happen, name
            )
        self.ends_at = until_s

    def _happen(self, name: str) -> None:
        self.counts[name] += 1
        self.kinds[name][1]()

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
            self.world.kill(worker.process)
            is_same_name = self.rng.random() < 0.3
            self.world.replace_later(worker, self.rng.choice([0.02, 0.3, 2.0]), is_same_name=is_same_name)
            self._lasts(2.1)

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
        self.world.transfers.faults.failing[self.rng.choice(["post", "poll", "notifications"])] = (
            TransferError
        )

    def break_transport_silently(self) -> None:
        """It cannot, or does not know: the lease ends by its time."""
        verb = self.rng.choice(["connect", "post", "poll", "notify"])
        error = TransferError if verb == "notify" else PeerLostError
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
