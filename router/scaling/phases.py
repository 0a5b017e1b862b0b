"""Which workers of a pool of several phases do which of them. Pure.

A worker with one phase is not disturbed by the others: prompts do not lengthen the steps of answers. Moving a
worker costs nothing but the part of its prefix cache that is of no use any more, so it comes before starting
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.types.members import Phase

Phases = frozenset[Phase]


def divide(
    wants: Mapping[Phase, float], replica_ids: Sequence[str], current: Mapping[str, Phases]
) -> dict[str, Phases]:
    """The phases that each replica shall do. `wants`: workers that each phase of the pool needs. `current`:
    what they do now. Nothing changes as long as each phase has the workers that it needs."""
    phases = sorted(wants)
    if len(replica_ids) < len(phases):
        return {replica_id: frozenset(phases) for replica_id in replica_ids}
    single = {name: current[name] for name in replica_ids if len(current.get(name, ())) == 1}
    counts = {phase: sum(phase in phases_of for phases_of in single.values()) for phase in phases}
    if len(single) == len(replica_ids) and all(counts[phase] >= max(1.0, wants[phase]) for phase in phases):
        return single
    return _assigned(_counts(wants, len(replica_ids)), replica_ids, single)


def _counts(wants: Mapping[Phase, float], num_workers: int) -> dict[Phase, int]:
    """One for each phase; each other one goes where the most is wanted of a worker."""
    counts = dict.fromkeys(sorted(wants), 1)
    for _ in range(num_workers - len(counts)):
        counts[max(counts, key=lambda phase: wants[phase] / counts[phase])] += 1
    return counts


def _assigned(
    counts: dict[Phase, int], replica_ids: Sequence[str], single: Mapping[str, Phases]
) -> dict[str, Phases]:
    """Workers keep what they do, as far as the counts allow it."""
    left, found = dict(counts), {}
    for replica_id in replica_ids:
        for phase in single.get(replica_id, ()):
            if left[phase]:
                left[phase] -= 1
                found[replica_id] = frozenset((phase,))
    for replica_id in replica_ids:
        if replica_id not in found:
            phase = max(left, key=lambda each: (left[each], each))
            left[phase] -= 1
            found[replica_id] = frozenset((phase,))
    return found
