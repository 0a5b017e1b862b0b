"""All workers of one phase, as arrays over slots: what they are, their reported load, and their speed.

A worker keeps its slot while it lives; afterwards another worker may get the slot. Frequent events (a load
report, a request sent) write a few scalars. Rare events (a worker joins, its curves change) mark derived
arrays as stale, and the next read computes them again.

A worker that has not measured itself counts as the mean of the workers of equal role and hardware that have,
else of equal role, else as the mean of all that have, else as `UNMEASURED_S` per unit.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.types.curves import Curve
from cluster.types.members import Phase, Role
from cluster.types.messages import LoadReport
from router.policy.views import Worker

UNMEASURED_S = 1e-4  # per unit of work before any measurement
UNMEASURED_STEP_UNITS = 2048

Floats = NDArray[np.float64]


class CurveArrays(NamedTuple):
    """[slots] each; the parts of `Curve`."""

    fixed_s: Floats
    per_unit_s: Floats
    per_pair_s: Floats


@dataclass(eq=False, slots=True)
class Charge:
    """Work sent to a worker that the worker's reports do not contain yet. A charge belongs to one incarnation
    of the slot: if the worker leaves, its charges are void, even if another one joins under the same id or in
    the same slot."""

    slot: int
    incarnation: int
    num_units: float
    num_blocks: float
    known_at: float = 0.0  # when the work was sent to the worker
    is_counted: bool = True


class WorkerPool:
    """[slots] arrays; slots that are listed may be chosen.

    reported_units, sent_units    queued work: in the last report, and sent since
    reported_requests, …          the same for requests, running and waiting, and for blocks
    running_units                 about those of requests whose prompts are computed, in the last report
    context_tokens                in the last report
    first_units                   work that the running step may hold
    began_at, previous_at         when that step began, as far as is known, and the one before
    """

    def __init__(self, phase: Phase):
        self.phase = phase
        self.slots: dict[str, int] = {}  # replica id → slot
        self.replica_ids: list[str] = []  # by slot; "" where there is no worker
        self.hardware: list[tuple[Role, str]] = []  # role and hardware of the classes, by index
        self.is_listed = np.zeros(0, bool)
        # No progress for a while, or failure after failure: chosen only if all others are avoided, too
        self.is_avoided = np.zeros(0, bool)
        self.is_assigned = np.zeros(0, bool)  # to this phase: chosen before the others
        self.incarnations = np.zeros(0, np.int64)  # 0 where there is no worker
        self.classes = np.zeros(0, np.intp)  # index of the class
        self.takes_any = np.zeros(0, bool)  # prompts, of any answer; else of its own answers only
        self.keeps_blocks = np.zeros(0, bool)  # it has a prefix cache
        self.salts = np.zeros(0, np.uint64)
        self.num_blocks = np.zeros(0)
        self.reported_units = np.zeros(0)
        self.sent_units = np.zeros(0)
        self.reported_requests = np.zeros(0)
        self.sent_requests = np.zeros(0)
        self.reported_blocks = np.zeros(0)
        self.sent_blocks = np.zeros(0)
        self.running_units = np.zeros(0)
        self.context_tokens = np.zeros(0)
        self.first_units = np.zeros(0)
        self.began_at = np.zeros(0)
        self.previous_at = np.zeros(0)
        self._workers: dict[str, Worker] = {}
        self._measured: dict[str, dict[str, Curve]] = {}  # kind of work → replica id → curve
        self._step_units: dict[str, int] = {}
        self._resolved: dict[str, CurveArrays] = {}
        self._resolved_steps: Floats | None = None
        self._adapters: dict[str, frozenset[str]] = {}  # replica id → digests of adapters that it holds
        self._flags: dict[str, NDArray[np.bool_]] = {}  # what is asked of every worker → its answers
        self._unseen: dict[str, deque[Charge]] = {}  # by replica id, in order of `known_at`
        self._num_added = 0

    def __len__(self) -> int:
        """Slots, in use or not."""
        return len(self.replica_ids)

    def add(self, worker: Worker) -> None:
        """The worker is listed, and idle until it reports. Raises ValueError if it is there already."""
        if worker.replica_id in self.slots:
            raise ValueError(f"{worker.replica_id} is there already")
        if "" in self.replica_ids:
            slot = self.replica_ids.index("")
            self.replica_ids[slot] = worker.replica_id
        else:
            slot = len(self)
            self.replica_ids.append(worker.replica_id)
            for name, column in self._columns().items():
                setattr(self, name, np.append(column, np.zeros(1, column.dtype)))
        for column in self._columns().values():
            column[slot] = 0
        hardware = Role.ENCODE if self.phase is Phase.ENCODE else worker.role, worker.hardware
        if hardware not in self.hardware:
            self.hardware.append(hardware)
        self.slots[worker.replica_id] = slot
        self.is_listed[slot] = self.is_assigned[slot] = True
        self._num_added += 1
        self.incarnations[slot] = self._num_added
        self.began_at[slot] = self.previous_at[slot] = -np.inf
        self.classes[slot] = self.hardware.index(hardware)
        self.takes_any[slot] = self.keeps_blocks[slot] = worker.role.prefills
        self.salts[slot] = content_hash(worker.replica_id.encode())
        self.num_blocks[slot] = worker.num_blocks
        self._workers[worker.replica_id] = worker
        self._unseen[worker.replica_id] = deque()
        self._forget_resolved()

    def remove(self, replica_id: str) -> int:
        """Returns the worker's slot. Raises KeyError for a worker that is not there."""
        slot = self.slots.pop(replica_id)
        self.replica_ids[slot] = ""
        for column in self._columns().values():
            column[slot] = 0
        del self._workers[replica_id]
        del self._unseen[replica_id]
        self._adapters.pop(replica_id, None)
        for curves in self._measured.values():
            curves.pop(replica_id, None)
        self._step_units.pop(replica_id, None)
        self._forget_resolved()
        return slot

    def able(self, modality: str) -> NDArray[np.bool_]:
        """[slots]: listed workers that take the modality, avoided or not."""
        takes = self._asked(
            f"takes {modality}", lambda each: not each.modalities or modality in each.modalities
        )
        return takes & self.is_listed

    def set_adapters(self, replica_id: str, digests: frozenset[str]) -> None:
        """The LoRA adapters that the worker holds."""
        self._adapters[replica_id] = digests
        self._flags.clear()

    def holding(self, digest: str) -> NDArray[np.bool_]:
        """[slots]: workers that hold the adapter."""
        return self._asked(f"holds {digest}", lambda each: digest in self._adapters.get(each.replica_id, ()))

    def _asked(self, question: str, answer: Callable[[Worker], bool]) -> NDArray[np.bool_]:
        """[slots]: the answer of every worker; False where there is none."""
        if question not in self._flags:
            flags = self._flags[question] = np.zeros(len(self), bool)
            for replica_id, worker in self._workers.items():
                flags[self.slots[replica_id]] = answer(worker)
        return self._flags[question]

    def preferred(
        self, is_able: NDArray[np.bool_], avoided: Collection[str] = frozenset()
    ) -> NDArray[np.bool_]:
        """[…, slots]: of the able workers those that are not avoided by all, of these those that this
        request does not avoid, and of these those that the phase is assigned to. All of them if none is."""
        for is_preferred in (~self.is_avoided, self._is_not(avoided), self.is_assigned):
            both = is_able & is_preferred
            is_able = np.where(both.any(-1, keepdims=True), both, is_able)
        return is_able

    def is_not_avoided(self, avoided: Collection[str]) -> NDArray[np.bool_]:
        """[slots]: neither by all, nor by a request that avoids these workers."""
        return ~self.is_avoided & self._is_not(avoided)

    def _is_not(self, avoided: Collection[str]) -> NDArray[np.bool_]:
        others = np.ones(len(self), bool)
        others[[self.slots[replica_id] for replica_id in avoided if replica_id in self.slots]] = False
        return others

    @property
    def devices(self) -> list[str]:
        """[slots]: what `Worker.device` says; a name of its own for a worker or slot that shares none."""
        workers = map(self._workers.get, self.replica_ids)
        return [(worker and worker.device) or f"slot {slot}" for slot, worker in enumerate(workers)]

    def hardware_of(self, replica_id: str) -> tuple[Role, str]:
        """With its role: what predictions are corrected by."""
        return self.hardware[self.classes[self.slots[replica_id]]]

    # --- how fast they are

    def measured(self, replica_id: str, curves: dict[str, Curve], max_step_units: int) -> None:
        """`curves`: by kind of work. They replace all earlier ones of the worker."""
        for kind in (*self._measured, *curves):
            of_kind = self._measured.setdefault(kind, {})
            of_kind.pop(replica_id, None)
            if kind in curves:
                of_kind[replica_id] = curves[kind]
        if max_step_units > 0:
            self._step_units[replica_id] = max_step_units
        self._forget_resolved()

    def curve(self, kind: str, unmeasured_s: float = UNMEASURED_S) -> CurveArrays:
        """Returns the curves of all workers. `unmeasured_s`: per unit, before any worker has measured it."""
        if kind not in self._resolved:
            parts = self._own(kind)
            self._fill(parts, (0.0, unmeasured_s, 0.0))
            self._resolved[kind] = CurveArrays(*np.ascontiguousarray(parts.T))
        return self._resolved[kind]

    def own_curve(self, kind: str) -> CurveArrays:
        """Returns the curves of the workers that have measured it themselves; NaN for the others, which
        cannot do this work."""
        key = f"own {kind}"
        if key not in self._resolved:
            self._resolved[key] = CurveArrays(*np.ascontiguousarray(self._own(kind).T))
        return self._resolved[key]

    def _own(self, kind: str) -> Floats:
        """[slots, 3]"""
        parts = np.full((len(self), 3), np.nan)
        for replica_id, curve in self._measured.get(kind, {}).items():
            parts[self.slots[replica_id]] = curve.fixed_s, curve.per_unit_s, curve.per_pair_s
        return parts

    @property
    def step_units(self) -> Floats:
        """[slots]: largest number of units in a step."""
        if self._resolved_steps is None:
            steps = np.full((len(self), 1), np.nan)
            for replica_id, num_units in self._step_units.items():
                steps[self.slots[replica_id]] = num_units
            self._fill(steps, (UNMEASURED_STEP_UNITS,))
            self._resolved_steps = steps[:, 0]
        return self._resolved_steps

    def _fill(self, parts: Floats, unmeasured: tuple[float, ...]) -> None:
        """Rows of NaN become the mean of their class, else of their role, else of all, else `unmeasured`."""
        is_missing = np.isnan(parts[:, 0])
        known = parts[~is_missing]
        if not is_missing.any():
            return
        parts[is_missing] = known.mean(0) if len(known) else unmeasured
        roles = {role for role, _ in self.hardware}
        alike = [[i for i, (other, _) in enumerate(self.hardware) if other is role] for role in roles]
        for classes in (*alike, *([index] for index in range(len(self.hardware)))):
            is_alike = np.isin(self.classes, classes)
            if (is_alike & ~is_missing).any():
                parts[is_alike & is_missing] = parts[is_alike & ~is_missing].mean(0)

    def _forget_resolved(self) -> None:
        self._resolved.clear()
        self._flags.clear()
        self._resolved_steps = None

    # --- how busy they are

    def num_waiting(self, rest: Floats) -> Floats:
        """[…, slots]: requests outside the running step, if `rest` of the units are outside it."""
        total = np.maximum(1.0, self.reported_units + self.sent_units)
        return (self.reported_requests + self.sent_requests) * np.minimum(1.0, rest / total)

    def reported(self, replica_id: str, load: LoadReport, now: float, round_trip_s: float) -> None:
        """A report does not contain work that was sent less than a round trip ago. If it contains less than
        the last report and the work sent since, a step has ended and the next one has begun."""
        slot = self.slots[replica_id]
        expected = self.reported_units[slot]
        unseen = self._unseen[replica_id]
        while unseen and unseen[0].known_at <= now - round_trip_s:
            charge = unseen.popleft()
            expected += charge.num_units if charge.is_counted else 0.0
            self.discharge(charge)
        self.reported_units[slot] = load.num_queued_units
        self.reported_requests[slot] = load.num_running + load.num_waiting
        share = 1 - load.num_prompts / max(1, load.num_prompts, load.num_running + load.num_waiting)
        self.running_units[slot] = load.num_queued_units * share
        self.reported_blocks[slot] = load.num_used_blocks
        self.context_tokens[slot] = load.num_context_tokens
        if load.num_queued_units < expected or self.first_units[slot] <= 0:
            self._begin(slot, load.num_queued_units, now)

    def charge(self, replica_id: str, num_units: float, num_blocks: float = 0.0) -> Charge:
        """Work that will be sent to the worker counts from now on."""
        slot = self.slots[replica_id]
        charge = Charge(slot, int(self.incarnations[slot]), num_units, num_blocks)
        self._count(charge, 1)
        return charge

    def has(self, charge: Charge) -> bool:
        """Whether the worker that was charged is still there."""
        return bool(self.incarnations[charge.slot] == charge.incarnation)

    def told(self, charge: Charge, now: float, num_ready: float | None = None) -> bool:
        """The work has been sent, so later reports contain it. Returns whether the worker has no other work
        and begins at once, with `num_ready` of the units."""
        slot = charge.slot
        if not charge.is_counted or not self.has(charge):
            return False
        begins = self.reported_units[slot] + self.sent_units[slot] <= charge.num_units
        if begins:
            self._begin(slot, charge.num_units if num_ready is None else num_ready, now)
        charge.known_at = now
        self._unseen[self.replica_ids[slot]].append(charge)
        return bool(begins)

    def discharge(self, charge: Charge) -> None:
        """The work is done or cancelled, or a report contains it. May be repeated."""
        if charge.is_counted:
            charge.is_counted = False
            self._count(charge, -1)

    def _begin(self, slot: int, num_units: float, now: float) -> None:
        self.first_units[slot] = num_units
        self.previous_at[slot], self.began_at[slot] = self.began_at[slot], now

    def _count(self, charge: Charge, sign: int) -> None:
        if not self.has(charge):
            return
        slot = charge.slot
        self.sent_units[slot] += sign * charge.num_units
        self.sent_blocks[slot] += sign * charge.num_blocks
        self.sent_requests[slot] += sign

    def _columns(self) -> dict[str, NDArray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def running_step(
    pool: WorkerPool, num_units: Floats, step_units: Floats, fixed_s: Floats, per_unit_s: Floats, now: float
) -> tuple[Floats, Floats]:
    """Units in the running step, of `num_units` that may be in it and `step_units` that a step may have, and
    the seconds until it ends. A step that began more than twice its duration ago does not run: the worker was
    idle at its last report."""
    running = np.minimum(num_units, step_units)
    step_s = fixed_s + running * per_unit_s
    age_s = now - pool.began_at
    is_running = (running > 0) & (age_s <= 2 * step_s)
    return running * is_running, np.maximum(0.0, step_s - age_s) * is_running


def content_hash(content: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def rendezvous(salts: NDArray[np.uint64], content: bytes) -> Floats:
    """[slots], 0 to 1. If every door chooses the smallest value for a content, all doors choose the same
    worker, and a worker that joins or leaves moves only its own contents (Thaler and Ravishankar 1998). The
    mixing is that of splitmix64."""
    mixed = salts ^ content_hash(content)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) * np.float64(2.0**-64)
