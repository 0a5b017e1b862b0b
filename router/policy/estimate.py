"""How long a placement of one request would take, and what it costs. All policies share this estimate.

The cost of a placement, in seconds, is

    time to first token + KV transfer that is not hidden + decode's first step + delay of others

plus a small term that only decides between equals. "Delay of others" is the request's own work at each
worker, for every request that waits there: a request in a long queue delays all requests that arrive while
the queue lasts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.policy.at_decodes import DecodeEstimate, KvTransferEstimate
from router.policy.at_encoders import EncodeEstimate
from router.policy.at_prefills import PrefillEstimate
from router.policy.cluster import ClusterView
from router.policy.pool import rendezvous
from router.policy.shared import PromptSteps
from router.policy.views import ItemPrediction, Placement, Prediction, RequestView

# of the shortest time to first token: caches and hashing decide smaller differences
TIE_RATIO = 0.01


class Estimate:
    """Every placement of one request, at one instant. Slots are indices into the pools' arrays."""

    def __init__(self, request: RequestView, cluster: ClusterView, now: float):
        """Raises UnavailableError with the empty pool, and RequestError if no worker is large enough."""
        self.request = request
        self.cluster = cluster
        self.encoders = EncodeEstimate(request.media, cluster, now, avoided=request.avoided)
        self.earliest_s = self.encoders.earliest_s
        steps = PromptSteps(cluster, request.block_size)
        self.decodes = DecodeEstimate(request, cluster, steps)
        shared = cluster.shared
        can_decode = shared.at_prefills(self.decodes.is_able) > 0
        blocks_s = shared.at_prefills(self.decodes.blocks_s)
        self.prefills = PrefillEstimate(request, cluster, now, self.earliest_s, can_decode, steps, blocks_s)
        self.tie_s = TIE_RATIO * float(self.prefills.text_s[self.prefills.is_able].min())
        if self.tie_s > 0:
            self._break_ties()

    def ttft_s(self, prefill: int, encoders: Sequence[int]) -> float:
        """Seconds until the first token."""
        items = self.encoders.predict(prefill, encoders, self.prefills.is_needed[:, prefill])
        return self._ttft_of(prefill, items)

    def prediction(self, placement: Placement) -> Prediction:
        """Raises KeyError for a placement on workers that are not there, or that do not go together."""
        pools = self.cluster
        prefill, decode = pools.prefills.slots[placement.prefill], pools.decodes.slots[placement.decode]
        encoders = [pools.encoders.slots[encoder] for encoder in placement.encoders]
        kv_transfer = self.kv_transfer(placement, prefill)
        if kv_transfer is None:
            raise KeyError(placement.codec)
        items = self.encoders.predict(prefill, encoders, self.prefills.is_needed[:, prefill])
        text_s, queue_s = float(self.prefills.text_s[prefill]), float(self.prefills.queue_s[prefill])
        ttft_s = self._ttft_of(prefill, items)
        kind = self.cluster.kind_of(self.request, placement, ttft_s - text_s)
        low_s, high_s = self.cluster.calibration.interval(kind, ttft_s)
        end_s = float(kv_transfer.end_s(ttft_s)[decode])
        # If decode had the blocks
        before_s = float(kv_transfer.before_s[decode] - self.decodes.blocks_s[decode])
        at_once_s = max(ttft_s + float(kv_transfer.after_s[decode]), before_s)
        return Prediction(
            media_s=ttft_s - text_s,
            queue_s=queue_s,
            prefill_s=text_s - queue_s,
            ttft_s=ttft_s,
            transfer_s=at_once_s - ttft_s,
            first_step_s=end_s - at_once_s,
            low_s=low_s,
            high_s=high_s,
            items=tuple(items),
            work_s=float(self.prefills.work_s[prefill]),
        )

    def _ttft_of(self, prefill: int, items: Sequence[ItemPrediction]) -> float:
        arrivals = np.array([item.arrival_s for item in items])
        return self.prefills.ttft_s(arrivals, prefill)

    def kv_transfer(self, placement: Placement, prefill: int) -> KvTransferEstimate | None:
        """None: the worker sends no KV, or not in this codec."""
        for kv_transfer in self.decodes.kv_transfers(prefill, self.prefills):
            is_codec = kv_transfer.is_local or kv_transfer.codec == placement.codec
            if kv_transfer.is_local == placement.is_local and is_codec:
                return kv_transfer
        return None

    def _break_ties(self) -> None:
        """Among workers that would compute the prompt about equally soon prefer the one that has more of the
        prompt, or is about to; then use rendezvous."""
        content = self.request.block_hashes[0] if self.request.block_hashes else b""
        salts = self.cluster.prefills.salts
        expected = self.cluster.prefixes.expecting(content, len(salts))
        cached = self.prefills.num_cached / self.request.num_prompt_tokens
        lack = 1 - np.maximum(cached, 0.5 * expected)
        self.prefills.cost_s = self.prefills.cost_s + self.tie_s * (lack + 0.1 * rendezvous(salts, content))
        self.encoders.break_ties(self.cluster.encoders, self.tie_s / max(1, len(self.request.media)))
        self.decodes.break_ties(self.tie_s)
