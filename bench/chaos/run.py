"""The experiment: a cluster, its undisturbed answers, then one fault after the other under load.

A round is one fault: a load starts; when as many requests have ended as there are clients, the fault happens;
the load goes on until the cluster is whole again and the round has had its requests. Then all requests in
flight end, and nothing may be held.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import aiohttp

from bench import clusters
from bench.chaos.calls import endless, make_calls
from bench.chaos.client import Choices, FrontProbe, Load, Sending
from bench.chaos.recovery import Doors, Fault, Recovery, Watch
from bench.client import open_session
from bench.processes import REPLICAS, Processes, send_signal
from bench.records import Record
from deploy.serving.launch import LocalCluster

IDLE_TIMEOUT_S = 60.0
SIGNALS = {"kill": SIGKILL, "stop": SIGSTOP}
# A request waits as long as it must: only its deadline ends it.
PATIENT = {"admission": {"classes": [{"name": "all", "max_wait_s": 600}]}, "first_token_timeout_s": 600}


@dataclass(frozen=True)
class Plan:
    """`counts`: replicas by kind, in the order of REPLICAS. `faults`: (kind, signal), in their order."""

    counts: tuple[int, ...]
    faults: Sequence[tuple[str, str]]
    num_requests: int  # of each round at least
    concurrency: int
    seed: int
    stopped_s: float
    whole_s: float  # limit of a recovery
    deadline_s: float  # of a request, at the client
    num_calls: int  # different ones
    threads: int

    @property
    def cluster(self) -> str:
        return " + ".join(f"{n} {kind}" for n, kind in zip(self.counts, REPLICAS, strict=True))

    @property
    def expected(self) -> dict[str, int]:
        return dict(zip(REPLICAS, self.counts, strict=True))


@dataclass
class Round:
    """What came of one fault."""

    fault: Fault
    sendings: list[Sending]
    recovery: Recovery
    front_away_s: float
    held: Mapping[str, float]
    processes: Mapping[str, int]  # by kind, how many more or fewer than before
    notes: list[str] = field(default_factory=list)


def running(plan: Plan) -> AbstractContextManager[LocalCluster]:
    """A cluster that the product's own command runs, with the shipped file and these numbers of replicas."""
    workers = {kind: {"threads": plan.threads} for kind in REPLICAS[:3]}
    replicas = {kind.capitalize(): number for kind, number in plan.expected.items()}
    return clusters.running(clusters.configuration({**workers, "door": PATIENT}, replicas))


class Experiment:
    """An experiment on one running cluster. Raises RuntimeError if the undisturbed cluster does not answer
    everything."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession, plan: Plan):
        self._cluster, self._session, self._plan = cluster, session, plan
        self._processes = Processes(cluster.folder)
        self._doors = Doors(self._processes, session)
        self._calls = make_calls(plan.seed, plan.num_calls)
        self._right: dict[int, tuple[Choices, int]] = {}
        self._rng = random.Random(plan.seed)
        self._model_id = ""
        self._num_rounds = 0

    async def undisturbed(self) -> Record:
        """Every call once; the answers are what is right from now on."""
        async with self._session.get(f"{self._cluster.url}/v1/models") as response:
            self._model_id = (await response.json())["data"][0]["id"]
        load = self._load("undisturbed")
        async with FrontProbe(self._cluster.url) as front:
            load.start(iter(self._calls), self._plan.concurrency)
            await load.until(lambda: False, self._plan.deadline_s * self._plan.num_calls)
            await load.stop()
        for sending in load.sendings:
            if sending.failure:
                raise RuntimeError(f"undisturbed, a {sending.kind} request was lost: {sending.failure}")
            expected = sending.call.num_tokens * sending.call.fields.get("n", 1)
            if sending.num_tokens != expected:
                raise RuntimeError(f"{sending.num_tokens} tokens instead of {expected}")
            self._right[sending.call.number] = sending.choices, sending.num_tokens
        nothing = Fault("none", "", 0, time.monotonic())
        held = await self._until_idle()
        return self._record(Round(nothing, load.sendings, Recovery(), front.away_s, held, {}))

    async def round(self, kind: str, signal: str) -> Record:
        """One fault. The record has a note if the cluster did not become whole."""
        plan, self._num_rounds = self._plan, self._num_rounds + 1
        before = self._processes.counts()
        load = self._load(f"round {self._num_rounds}")
        notes: list[str] = []
        async with FrontProbe(self._cluster.url) as front:
            load.start(endless(self._calls, plan.seed + self._num_rounds), plan.concurrency)
            await load.until(lambda: load.num_ended >= plan.concurrency, plan.deadline_s)
            watch = Watch(self._cluster.folder, self._doors, self._processes, plan.expected)
            fault, recovery = self._strike(kind, signal), Recovery()
            resuming = asyncio.create_task(self._resume(fault))
            await watch.whole(fault, recovery, plan.whole_s, self._cluster.has_ended)
            await resuming
            if not recovery.is_whole:
                notes.append(f"not whole after {plan.whole_s:.0f} s")
            if self._cluster.has_ended():
                notes.append("the cluster has ended")
            else:
                await load.until(lambda: load.num_ended >= plan.num_requests, plan.deadline_s)
            await load.stop()
        held = await self._until_idle()
        after = self._processes.counts()
        changed = {
            name: after[name] - before[name] for name in {*before, *after} if after[name] != before[name]
        }
        return self._record(Round(fault, load.sendings, recovery, front.away_s, held, changed, notes))

    def _strike(self, kind: str, signal: str) -> Fault:
        """Raises RuntimeError if there is no such process."""
        pids = self._processes.of(kind)
        if not pids:
            raise RuntimeError(f"the cluster has no process of the kind {kind!r}")
        pid = self._rng.choice(pids)
        now = time.monotonic()
        send_signal([pid], SIGNALS[signal])
        return Fault(kind, signal, pid, now, now + self._plan.stopped_s if signal == "stop" else None)

    async def _resume(self, fault: Fault) -> None:
        if fault.resumed_at is not None:
            await asyncio.sleep(fault.resumed_at - time.monotonic())
            send_signal([fault.pid], SIGCONT)

    async def _until_idle(self) -> Mapping[str, float]:
        """What is still held at the end of the time."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while (held := await self._doors.held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        return held

    def _load(self, name: str) -> Load:
        return Load(self._session, self._cluster.url, self._model_id, name)

    def _record(self, done: Round) -> Record:
        complete = [each for each in done.sendings if not each.failure]
        lost = [each for each in done.sendings if each.failure]
        wrong = [
            each for each in complete if (each.choices, each.num_tokens) != self._right[each.call.number]
        ]
        at = done.fault.at
        gone_at = at + done.recovery.gone_s
        losses = [
            {
                "when": when_lost(each, gone_at),
                "why": each.failure,
                "kind": each.kind,
                "streamed": each.call.is_streamed,
                "after_s": round(each.ended_at - at, 2),
            }
            for each in lost
        ]
        when = Counter(loss["when"] for loss in losses)
        first = [each.chunks_at[0] - each.started_at for each in complete if each.chunks_at]
        return {
            "cluster": self._plan.cluster,
            "concurrency": self._plan.concurrency,
            "fault": done.fault.name,
            "sent": len(done.sendings),
            "right": len(complete) - len(wrong),
            "wrong": len(wrong),
            "lost_open": when["open"],
            "lost_later": when["later"],
            "refused": when["refused"],
            "pause_s": max((each.longest_pause_s for each in complete), default=0.0),
            "ttft_s": max(first, default=0.0),
            "front_away_s": done.front_away_s,
            "stages": done.recovery.stages,
            "held": dict(done.held),
            "processes": dict(done.processes),
            "losses": losses,
            "wrong_answers": [self._difference(each) for each in wrong],
            "notes": done.notes,
        }

    def _difference(self, sending: Sending) -> dict[str, Any]:
        """Where an answer differs from the right one."""
        choices, num_tokens = self._right[sending.call.number]
        pairs = list(zip(sending.choices, choices, strict=False))
        index = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
        found: dict[str, Any] = {"call": sending.call.number, "kind": sending.kind, "choice": index}
        if index is not None:
            (got, reason), (wanted, wanted_reason) = pairs[index]
            same = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
                min(len(got), len(wanted)),
            )
            found |= {
                "at_character": same,
                "of": len(wanted),
                "got": got[same : same + 40],
                "wanted": wanted[same : same + 40],
                "finish": [reason, wanted_reason],
            }
        return found | {"tokens": [sending.num_tokens, num_tokens], "streamed": sending.call.is_streamed}


def when_lost(sending: Sending, gone_at: float) -> str:
    """`open`: it was sent before the killed process was gone. `refused`: the front took no connection."""
    if sending.started_at <= gone_at:
        return "open"
    return "refused" if sending.failure.startswith("ClientConnectorError") else "later"


async def measure(cluster: LocalCluster, plan: Plan, first_fault: int, keep: Any) -> int:
    """Runs the faults from this one on; `keep` takes each record. Returns the next fault: fewer than all if
    the cluster has ended."""
    async with open_session(plan.deadline_s, keeps_connections=True) as session:
        experiment = Experiment(cluster, session, plan)
        keep(await experiment.undisturbed())
        for i in range(first_fault, len(plan.faults)):
            keep(await experiment.round(*plan.faults[i]))
            if cluster.has_ended():
                return i + 1
    return len(plan.faults)
