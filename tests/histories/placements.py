"""Placements that no sensible policy makes, and that must be right all the same: any worker that can do a
phase may be chosen for it. An item may be encoded far from a prompt whose own worker could encode it, KV may
travel between workers that do all phases."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import numpy as np

from router.policy import ClusterView, Decision, ItemView, JointPolicy, Placement, RequestView
from router.policy.at_encoders import EncodeEstimate
from router.policy.baselines import StagedPolicy
from router.policy.estimate import Estimate
from router.policy.pool import Floats


class ScatteredPolicy(StagedPolicy):
    def __init__(self, rng: Random, share: float):
        """`share`: of the placements that are drawn; the others are the cheapest."""
        self._rng, self._share, self._joint = rng, share, JointPolicy()

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        cheapest = self._joint.decide(request, cluster, now)  # raises if the request cannot be placed
        if not self._is_drawn():
            return cheapest
        drawn = super().decide(request, cluster, now)
        return self._at_decode(request, cluster, now, drawn) or drawn

    def _at_decode(
        self, request: RequestView, cluster: ClusterView, now: float, drawn: Decision
    ) -> Decision | None:
        """In half of the cases where that is possible: the prompt is computed by a worker that decodes, and
        does not prefill."""
        estimate = Estimate(request, cluster, now)
        able = np.flatnonzero(estimate.prefills.is_able & ~cluster.prefills.takes_any)
        if not len(able) or self._rng.random() < 0.5:
            return None
        own = cluster.prefills.replica_ids[int(self._rng.choice(able))]
        placement = Placement(drawn.placement.encoders, own, own)
        return Decision(placement, estimate.prediction(placement))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        if not self._is_drawn():
            return self._joint.place_item(item, cluster, now, excluded)
        is_able = EncodeEstimate([item], cluster, now, excluded).is_able[0]
        return cluster.encoders.replica_ids[self._least(self._drawn(len(is_able)), is_able)]

    def _encoders(self, estimate: Estimate) -> list[int]:
        return [self._least(self._drawn(len(row)), row) for row in estimate.encoders.is_able]

    def _prefill_scores(self, estimate: Estimate) -> Floats:
        return self._drawn(len(estimate.cluster.prefills))

    def _decode_scores(self, estimate: Estimate) -> Floats:
        return self._drawn(len(estimate.cluster.decodes))

    def _is_drawn(self) -> bool:
        return self._share > 0.0 and self._rng.random() < self._share

    def _drawn(self, number: int) -> Floats:
        return np.array([self._rng.random() for _ in range(number)])
