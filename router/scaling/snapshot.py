"""What a scaling decision is made from. Frozen values.

Work is counted in seconds of one worker, as the router predicts it when a request arrives: with its cost
model, the workers' measured curves and the corrections that it has learnt. So one second of work for each
second of time needs one worker that is always busy."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.types.members import Role


@dataclass(frozen=True, slots=True)
class DoorReport:
    """The report of one door. Totals since its start, which are summed over doors:

    num_requests                       that arrived, refused ones included
    encode_s, prefill_s                predicted work of these
    encode_s2, prefill_s2              sums of the squares of each request's work: how much it varies
    num_answered, num_in_time          with a first token; with one within the target
    num_refused                        by admission control

    Now, summed over doors:

    waiting_encode_s, waiting_prefill_s    work of the requests that wait for admission at this door

    Now, of the whole cluster, so the largest of the doors' figures counts:

    queued_encode_s, queued_prefill_s  work in the workers' queues
    used_blocks_ratio                  the sum, over workers that decode, of the part of its KV blocks in use
    answers_s                          the same sum of how much longer a step is for the answers there
    step_s                             of such a worker's step without them, on average
    """

    num_requests: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    encode_s2: float = 0.0
    prefill_s2: float = 0.0
    num_answered: float = 0.0
    num_in_time: float = 0.0
    num_refused: float = 0.0
    waiting_encode_s: float = 0.0
    waiting_prefill_s: float = 0.0
    queued_encode_s: float = 0.0
    queued_prefill_s: float = 0.0
    used_blocks_ratio: float = 0.0
    answers_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of one pool. `target`: replicas that it has or is to have; `replica_ids`: those that run."""

    role: Role
    target: int
    min_replicas: int
    max_replicas: int
    replica_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`doors`: the last report of each, by replica id. Without one, nothing is known and nothing changes."""

    pools: tuple[PoolState, ...]
    doors: dict[str, DoorReport]
