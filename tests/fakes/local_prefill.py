"""A placement that leaves text prompts to decode, as a test wants it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from router.door import Door
from router.policy import ClusterView, Decision, JointPolicy, RequestView


class LocalPrefillPolicy(JointPolicy):
    """Text for which `stays(number of this text)` says so is computed by decode; anything else goes the
    ordinary way."""

    def __init__(self, stays: Callable[[int], bool] = lambda _: True):
        super().__init__()
        self._stays = stays
        self.num_texts = 0
        self.num_local = 0

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        decision = super().decide(dataclasses.replace(request, may_prefill_locally=False), cluster, now)
        if not request.may_prefill_locally:
            return decision
        self.num_texts += 1
        if not self._stays(self.num_texts):
            return decision
        self.num_local += 1
        placement = dataclasses.replace(decision.placement, prefill=None)
        return dataclasses.replace(decision, placement=placement)


def let_prefill_locally(door: Door, stays: Callable[[int], bool] = lambda _: True) -> LocalPrefillPolicy:
    """From now on this door's texts are placed so."""
    policy = LocalPrefillPolicy(stays)
    door._flow._placer._policy = policy
    return policy
