"""The scaling decision in virtual time: what arrives at the doors → how many replicas each pool shall
have."""

from __future__ import annotations

from dataclasses import replace

from cluster.types.members import Phase, Role
from router.scaling import DoorReport, PoolState, Scaler, ScalingDecision, ScalingSettings, Snapshot

SETTINGS = ScalingSettings(utilisation=0.75, start_s=30.0, drain_s=15.0)
SPLIT = (Role.ENCODE, Role.PREFILL, Role.DECODE)


class Traffic:
    """One or more doors whose arrivals have a rate; follows what the scaler decides."""

    def __init__(self, settings: ScalingSettings = SETTINGS, roles=SPLIT, most: int = 8, doors: int = 1):
        self.scaler, self.now, self.most = Scaler(settings), 0.0, most
        self.targets = dict.fromkeys(roles, 1)
        self.reports = {f"door {number}": DoorReport() for number in range(doors)}
        self.decision = ScalingDecision()
        self.causes: list[tuple[Role, int, str]] = []

    def run(self, seconds: float, encode: float = 0.0, prefill: float = 0.0, **now: float) -> dict[Role, int]:
        """`encode`, `prefill`: workers that what arrives keeps busy; 20 requests come in a second. `now`:
        other figures of each door."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for name, last in self.reports.items():
                part = 1 / len(self.reports)
                totals = {
                    "num_requests": last.num_requests + 20 * part,
                    "encode_s": last.encode_s + encode * part,
                    "prefill_s": last.prefill_s + prefill * part,
                    "encode_s2": last.encode_s2 + encode**2 / 20 * part,
                    "prefill_s2": last.prefill_s2 + prefill**2 / 20 * part,
                    "num_answered": last.num_answered + 20 * part,
                    "num_in_time": last.num_in_time + 20 * part,
                }
                self.reports[name] = DoorReport(**(totals | now))
            self._decide()
        return self.targets

    def _decide(self) -> None:
        pools = tuple(
            PoolState(role, target, 1, self.most, tuple(f"{role}-{i}" for i in range(target)))
            for role, target in self.targets.items()
        )
        decision = self.scaler.decide(Snapshot(pools, dict(self.reports)), self.now)
        if decision is not None:
            self.decision = decision
            self.causes += ((each.role, each.after, each.cause) for each in decision.changes)
            self.targets = dict(decision.targets)


def test_a_load_step_gives_the_right_targets_within_five_seconds():
    traffic = Traffic()
    traffic.run(30, encode=0.2, prefill=0.5)
    assert traffic.targets == {Role.ENCODE: 1, Role.PREFILL: 1, Role.DECODE: 1}
    # 3 and 4 workers are busy all the time; a queue builds up, as a cluster that is too small would have it
    for second in range(5):
        traffic.run(
            1, encode=2.25, prefill=3.75, waiting_prefill_s=3.0 * second, waiting_encode_s=1.5 * second
        )
    assert traffic.targets[Role.ENCODE] in (3, 4)
    assert traffic.targets[Role.PREFILL] in (5, 6)
    traffic.run(60, encode=2.25, prefill=3.75)  # the queues are gone
    assert (traffic.targets[Role.ENCODE], traffic.targets[Role.PREFILL]) == (3, 5)


def test_a_slow_phase_does_not_hide_the_phases_behind_it():
    """Prompts wait for encoders: prefill workers have nothing to do, and are started all the same."""
    traffic = Traffic()
    traffic.run(30, encode=3.0, prefill=3.0, queued_encode_s=40.0, queued_prefill_s=0.0)
    assert traffic.targets[Role.PREFILL] == 4


def test_a_pool_shrinks_after_the_time_that_a_replica_takes_to_come_back():
    traffic = Traffic()
    traffic.run(60, prefill=3.0)
    assert traffic.targets[Role.PREFILL] == 4
    traffic.run(SETTINGS.hold_s - 1, prefill=0.3)
    assert traffic.targets[Role.PREFILL] == 4
    traffic.run(30, prefill=0.3)
    assert traffic.targets[Role.PREFILL] == 1
    assert traffic.causes[-1] == (Role.PREFILL, 1, "idle")


def test_a_short_lull_and_noise_change_nothing():
    traffic = Traffic()
    traffic.run(60, prefill=2.9)
    before = len(traffic.causes)
    for _ in range(5):
        traffic.run(20, prefill=0.5)
        traffic.run(20, prefill=2.9)
    assert len(traffic.causes) == before


def test_many_doors_decide_as_one():
    one, many = Traffic(), Traffic(doors=5)
    for traffic in (one, many):
        traffic.run(40, encode=1.0, prefill=3.0, queued_prefill_s=20.0)
    assert one.targets == many.targets


def test_a_door_that_restarts_is_not_taken_for_traffic():
    traffic = Traffic()
    traffic.run(60, prefill=0.5)
    traffic.reports = {"another door": traffic.reports["door 0"]}  # large totals at first sight
    traffic.run(5, prefill=0.5)
    assert traffic.targets[Role.PREFILL] == 1


def test_without_a_report_nothing_is_decided():
    scaler = Scaler(SETTINGS)
    assert scaler.decide(Snapshot((PoolState(Role.PREFILL, 3, 1, 8),), {}), 1.0) is None


def test_decode_grows_with_its_memory_and_with_its_steps():
    full, slow = Traffic(), Traffic()
    full.run(5, used_blocks_ratio=2.1, step_s=0.02)
    assert full.targets[Role.DECODE] == 3
    slow.run(5, used_blocks_ratio=0.1, step_s=0.02, answers_s=0.16)  # 0.1 s a token are promised
    assert slow.targets[Role.DECODE] == 3


def test_late_first_tokens_give_the_tightest_phase_more_room():
    traffic = Traffic()
    traffic.run(60, encode=0.3, prefill=2.9)
    assert traffic.targets[Role.PREFILL] == 4
    traffic.run(30, encode=0.3, prefill=2.9, num_in_time=0.0)
    assert traffic.targets[Role.PREFILL] > 4
    assert (traffic.targets[Role.ENCODE], traffic.targets[Role.DECODE]) == (1, 1)
    assert traffic.causes[-1][2] == "late"


def test_a_budget_takes_what_is_only_held_first():
    traffic = Traffic(replace(SETTINGS, max_workers=6))
    traffic.run(60, encode=2.9)
    assert traffic.targets[Role.ENCODE] == 4
    traffic.run(20, prefill=2.9)  # the encoders would be held for longer
    assert traffic.targets[Role.PREFILL] == 4
    assert sum(traffic.targets.values()) == 6


def test_workers_move_between_phases_before_one_is_added():
    traffic = Traffic(roles=(Role.LANGUAGE,))
    traffic.targets = {Role.LANGUAGE: 4}
    traffic.run(40, prefill=2.0)
    assert _counts(traffic.decision) == {Phase.PREFILL: 3, Phase.DECODE: 1}
    traffic.run(5, prefill=0.3)
    traffic.run(40, prefill=0.3, used_blocks_ratio=2.0)
    assert _counts(traffic.decision) == {Phase.PREFILL: 1, Phase.DECODE: 3}
    assert traffic.targets == {Role.LANGUAGE: 4}
    traffic.run(10, prefill=3.0, used_blocks_ratio=3.0)
    assert traffic.targets[Role.LANGUAGE] == 8


def test_a_worker_keeps_its_phase_while_others_can_move():
    traffic = Traffic(roles=(Role.WHOLE,))
    traffic.targets = {Role.WHOLE: 5}
    traffic.run(10, encode=0.5, prefill=1.5)
    before = traffic.decision.phases
    assert _counts(traffic.decision) == {Phase.ENCODE: 1, Phase.PREFILL: 3, Phase.DECODE: 1}
    traffic.run(30, encode=1.8, prefill=0.5)
    assert _counts(traffic.decision) == {Phase.ENCODE: 3, Phase.PREFILL: 1, Phase.DECODE: 1}
    moved = [name for name, phases in traffic.decision.phases.items() if before[name] != phases]
    assert {before[name] for name in moved} == {frozenset({Phase.PREFILL})} and len(moved) == 2


def _counts(decision: ScalingDecision) -> dict[Phase, int]:
    return {
        phase: sum(each == {phase} for each in decision.phases.values())
        for phase in Phase
        if any(phase in each for each in decision.phases.values())
    }
