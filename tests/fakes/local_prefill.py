"""A placement that leaves prompts to decode, as a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from router.policy import ClusterView, Decision, JointPolicy, RequestView
from router.policy.estimate import Estimate
from tests.fakes.placement import cost_of, is_plain


class LocalPrefillPolicy(JointPolicy):
    """Prompts that decode can compute are computed there if `stays(number of this prompt)` says so: plain
    text, and media that decode has. Anything else is computed by a worker that prefills. Without `stays` it
    decides like its base."""

    def __init__(self, stays: Callable[[int], bool] | None = lambda _: True):
        super().__init__()
        self.let(stays)

    def let(self, stays: Callable[[int], bool] | None) -> None:
        """Prompts are placed so from now on."""
        self._stays = stays
        self.num_able = 0
        self.num_local = 0

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        decision = super().decide(request, cluster, now)
        if self._stays is None:
            return decision
        placement, estimate = decision.placement, Estimate(request, cluster, now)
        local = replace(placement, prefill=placement.decode, codec="raw")
        stays = False
        if is_plain(request) or cost_of(estimate, local) < float("inf"):
            self.num_able += 1
            stays = self._stays(self.num_able)
            self.num_local += stays
        if stays:
            return replace(decision, placement=local)
        if not placement.is_local:
            return decision
        pool = cluster.prefills
        prefill = pool.replica_ids[int((pool.is_listed & pool.takes_any).argmax())]
        placement = replace(placement, prefill=prefill, codec=next(iter(cluster.codecs)))
        return Decision(placement, estimate.prediction(placement))
