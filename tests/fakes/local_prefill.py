"""A placement that leaves text prompts to decode, as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from router.door import Door
from router.policy import ClusterView, Decision, JointPolicy, RequestView
from router.policy.estimate import Estimate
from tests.fakes.placement import is_plain


class LocalPrefillPolicy(JointPolicy):
    """Text for which `stays(number of this text)` says so is computed by decode; anything else by a worker
    that prefills."""

    def __init__(self, stays: Callable[[int], bool] = lambda _: True):
        super().__init__()
        self._stays = stays
        self.num_texts = 0
        self.num_local = 0

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        decision = super().decide(request, cluster, now)
        stays = False
        if is_plain(request):
            self.num_texts += 1
            stays = self._stays(self.num_texts)
            self.num_local += stays
        placement = decision.placement
        if stays:
            return replace(decision, placement=replace(placement, prefill=placement.decode, codec="raw"))
        if not placement.is_local:
            return decision
        pool = cluster.prefills
        prefill = pool.replica_ids[int((pool.is_listed & pool.takes_any).argmax())]
        placement = replace(placement, prefill=prefill, codec=next(iter(cluster.codecs)))
        return Decision(placement, Estimate(request, cluster, now).prediction(placement))


def let_prefill_locally(door: Door, stays: Callable[[int], bool] = lambda _: True) -> LocalPrefillPolicy:
    """From now on this door's texts are placed so."""
    policy = LocalPrefillPolicy(stays)
    door._flow._placer._policy = policy
    return policy
