"""Simpler policies for comparison: each chooses pool by pool, and fills in the same prediction. They send KV
in the first codec of the cluster's list. Workers that do not prefill compute no prompts for them.

RoundRobinPolicy   the next worker of each pool
LeastLoadedPolicy  the fewest queued units in each pool
PerStagePolicy     decode by load, then encoders, then prefill by cached prefix and load (the score of llm-d's
                   scheduler: prefix 2, queue 1, each from 0 to 1), each alone
LinearPolicy       prefill by tokens to compute plus tokens queued, decode by blocks (the cost of NVIDIA
                   Dynamo's KV router: weight × new prefill blocks + active blocks)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from router.policy.at_prefills import able_to_send
from router.policy.cluster import ClusterView
from router.policy.estimate import Estimate
from router.policy.joint import place_item
from router.policy.pool import Floats, WorkerPool, rendezvous
from router.policy.views import Decision, ItemView, Placement, RequestView

PREFIX_WEIGHT, QUEUE_WEIGHT = 2.0, 1.0


class StagedPolicy(ABC):
    """Decode, then encoders, then prefill; in each pool the able worker with the smallest score."""

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        estimate = Estimate(request, cluster, now)
        decode = self._least(self._decode_scores(estimate), estimate.decodes.is_able)
        encoders = self._encoders(estimate)
        prefill = self._least(self._prefill_scores(estimate), able_to_send(request, cluster.prefills))
        placement = Placement(
            tuple(cluster.encoders.replica_ids[encoder] for encoder in encoders),
            cluster.prefills.replica_ids[prefill],
            cluster.decodes.replica_ids[decode],
            next(iter(cluster.codecs)),
        )
        return Decision(placement, estimate.prediction(placement))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        return place_item(item, cluster, now, excluded)

    def _encoders(self, estimate: Estimate) -> list[int]:
        """One item after another. An item that an encoder has goes to that encoder."""
        pool, chosen = estimate.cluster.encoders, []
        added = np.zeros(len(pool))
        for idx, item in enumerate(estimate.encoders.items):
            is_able, is_held = estimate.encoders.is_able[idx], estimate.encoders.is_held[idx]
            scores = _queued(pool) + added + rendezvous(pool.salts, item.media_hash.encode())
            encoder = self._least(scores, is_held if is_held.any() else is_able)
            if not is_held[encoder]:
                added[encoder] += item.num_rows
            chosen.append(encoder)
        return chosen

    @staticmethod
    def _least(scores: Floats, is_able: NDArray[np.bool_]) -> int:
        return int(np.where(is_able, scores, np.inf).argmin())

    @abstractmethod
    def _prefill_scores(self, estimate: Estimate) -> Floats: ...

    def _decode_scores(self, estimate: Estimate) -> Floats:
        pool = estimate.cluster.decodes
        return _queued(pool) + rendezvous(pool.salts, estimate.request.request_id.encode())


class LeastLoadedPolicy(StagedPolicy):
    def _prefill_scores(self, estimate: Estimate) -> Floats:
        return _queued(estimate.cluster.prefills) + _content_spread(estimate)


class PerStagePolicy(StagedPolicy):
    def _prefill_scores(self, estimate: Estimate) -> Floats:
        queued = _queued(estimate.cluster.prefills)
        hit_ratio = estimate.prefills.num_cached / estimate.request.num_prompt_tokens
        load_ratio = queued / max(1.0, float(queued.max()))
        return QUEUE_WEIGHT * load_ratio - PREFIX_WEIGHT * hit_ratio + 1e-6 * _content_spread(estimate)


class LinearPolicy(StagedPolicy):
    def _prefill_scores(self, estimate: Estimate) -> Floats:
        queued = _queued(estimate.cluster.prefills)
        return estimate.prefills.num_uncached + queued + _content_spread(estimate)

    def _decode_scores(self, estimate: Estimate) -> Floats:
        pool = estimate.cluster.decodes
        return (
            pool.reported_blocks
            + pool.sent_blocks
            + rendezvous(pool.salts, estimate.request.request_id.encode())
        )


class RoundRobinPolicy(StagedPolicy):
    """The worker that was chosen longest ago. Caches do not count, neither of prompts nor of media."""

    def __init__(self) -> None:
        self._num_chosen = 0
        self._turns: dict[str, int] = {}  # replica id → when it was chosen last

    def _encoders(self, estimate: Estimate) -> list[int]:
        chosen = []
        for idx in range(len(estimate.encoders.items)):
            scores = self._last_turns(estimate.cluster.encoders)
            chosen.append(
                self._take(estimate.cluster.encoders, self._least(scores, estimate.encoders.is_able[idx]))
            )
        return chosen

    def _prefill_scores(self, estimate: Estimate) -> Floats:
        return self._last_turns(estimate.cluster.prefills)

    def _decode_scores(self, estimate: Estimate) -> Floats:
        return self._last_turns(estimate.cluster.decodes)

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        decision = super().decide(request, cluster, now)
        for pool, replica_id in (
            (cluster.prefills, decision.placement.prefill),
            (cluster.decodes, decision.placement.decode),
        ):
            self._take(pool, pool.slots[replica_id])
        return decision

    def _last_turns(self, pool: WorkerPool) -> Floats:
        return np.array([float(self._turns.get(replica_id, 0)) for replica_id in pool.replica_ids])

    def _take(self, pool: WorkerPool, slot: int) -> int:
        self._num_chosen += 1
        self._turns[pool.replica_ids[slot]] = self._num_chosen
        return slot


def _queued(pool: WorkerPool) -> Floats:
    return pool.reported_units + pool.sent_units


def _content_spread(estimate: Estimate) -> Floats:
    """Less than one unit, so it only decides between equals."""
    hashes = estimate.request.block_hashes
    return rendezvous(estimate.cluster.prefills.salts, hashes[0] if hashes else b"")
