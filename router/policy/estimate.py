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

from router.policy.at_decodes import DecodeEstimate, KvTransferEstimate, LocalPrefillEstimate
from router.policy.at_encoders import EncodeEstimate
from router.policy.at_prefills import PrefillEstimate
from router.policy.calibration import Kind
from router.policy.cluster import ClusterView
from router.policy.in_flight import kind_of
from router.policy.pool import rendezvous
from router.policy.views import ItemPrediction, Placement, Prediction, RequestView

TIE_RATIO = 0.01  # of the shortest time to first token; smaller differences count as ties


class Estimate:
    """Every placement of one request, at one instant. Slots are indices into the pools' arrays."""

    def __init__(self, request: RequestView, cluster: ClusterView, now: float, tie_ratio: float = TIE_RATIO):
        """Raises UnavailableError with the empty pool, and RequestError if no worker is large enough."""
        self.request = request
        self.cluster = cluster
        self.encoders = EncodeEstimate(request.media, cluster, now)
        self.earliest_s = self.encoders.earliest_s
        self.prefills = PrefillEstimate(request, cluster, now, self.earliest_s)
        self.decodes = DecodeEstimate(request, cluster)
        self.local_prefills = (
            LocalPrefillEstimate(request, cluster, self.decodes) if request.may_prefill_locally else None
        )
        self.tie_s = tie_ratio * float(self.prefills.text_s[self.prefills.is_able].min())
        if self.tie_s > 0:
            self._break_ties()

    def cost_s(self, placement: Placement) -> float:
        """Infinite for an impossible placement. Raises KeyError for workers that are not there."""
        decode = self._decode(placement)
        score_s = float(self.decodes.score_s[decode])
        if placement.prefill is None:
            if self.local_prefills is None:
                return np.inf
            return float(self.local_prefills.score_s(self.decodes)[decode])
        prefill, encoders = self._slots(placement)
        if not self.prefills.is_able[prefill] or not all(
            self.encoders.is_able[idx, encoder] for idx, encoder in enumerate(encoders)
        ):
            return np.inf
        ttft_s = self.ttft_s(prefill, encoders)
        end_s = float(self._kv_transfer(placement, prefill).end_s(ttft_s)[decode])
        needed = self.prefills.is_needed[:, prefill]
        encode_cost_s = sum(self.encoders.cost_s[idx, e] for idx, e in enumerate(encoders) if needed[idx])
        return end_s + score_s + float(self.prefills.cost_s[prefill] + encode_cost_s)

    def ttft_s(self, prefill: int, encoders: Sequence[int]) -> float:
        """Until the first token."""
        items = self.encoders.predict(prefill, encoders, self.prefills.is_needed[:, prefill])
        return self._ttft_of(prefill, items)

    def prediction(self, placement: Placement) -> Prediction:
        """Raises KeyError for a placement on workers that are not there."""
        decode = self._decode(placement)
        if placement.prefill is None:
            return self._predict_local_prefill(decode)
        prefill, encoders = self._slots(placement)
        items = self.encoders.predict(prefill, encoders, self.prefills.is_needed[:, prefill])
        text_s, queue_s = float(self.prefills.text_s[prefill]), float(self.prefills.queue_s[prefill])
        ttft_s = self._ttft_of(prefill, items)
        kind = kind_of(self.request, placement.prefill, ttft_s - text_s)
        low_s, high_s = self.cluster.interval(kind, ttft_s)
        kv_transfer = self._kv_transfer(placement, prefill)
        blocks_s = float(self.decodes.blocks_s[decode])
        end_s = float(kv_transfer.end_s(ttft_s)[decode])
        at_once_s = max(
            ttft_s + float(kv_transfer.after_s[decode]), float(kv_transfer.before_s[decode]) - blocks_s
        )
        return Prediction(
            media_s=ttft_s - text_s,
            queue_s=queue_s,
            prefill_s=text_s - queue_s,
            ttft_s=ttft_s,
            transfer_s=at_once_s - ttft_s,
            first_step_s=end_s - at_once_s + float(self.decodes.first_s[decode]),
            low_s=low_s,
            high_s=high_s,
            items=tuple(items),
        )

    def _ttft_of(self, prefill: int, items: Sequence[ItemPrediction]) -> float:
        arrivals = np.array([item.arrival_s for item in items])
        return self.prefills.ttft_s(arrivals, prefill)

    def _predict_local_prefill(self, decode: int) -> Prediction:
        assert self.local_prefills is not None, "the request allows no local prefill"
        queue_s, prefill_s = (
            float(self.local_prefills.queue_s[decode]),
            float(self.local_prefills.prefill_s[decode]),
        )
        low_s, high_s = self.cluster.interval(Kind.LOCAL_PREFILL, queue_s + prefill_s)
        step_s = float(self.decodes.step_s[decode])
        return Prediction(0.0, queue_s, prefill_s, queue_s + prefill_s, 0.0, step_s, low_s, high_s)

    def _slots(self, placement: Placement) -> tuple[int, list[int]]:
        assert placement.prefill is not None
        encoders = [self.cluster.encoders.slots[encoder] for encoder in placement.encoders]
        return self.cluster.prefills.slots[placement.prefill], encoders

    def _decode(self, placement: Placement) -> int:
        return self.cluster.decodes.slots[placement.decode]

    def _kv_transfer(self, placement: Placement, prefill: int) -> KvTransferEstimate:
        kv_transfers = self.decodes.kv_transfers(prefill, self.prefills)
        return next(f for f in kv_transfers if f.codec == placement.codec)

    def _break_ties(self) -> None:
        """Among near-equal prefill workers prefer the one that has more of the prompt, or is about to; then
        use rendezvous."""
        content = self.request.block_hashes[0] if self.request.block_hashes else b""
        salts = self.cluster.prefills.salts
        expected = self.cluster.prefixes.expecting(content, len(salts))
        cached = self.prefills.num_cached / self.request.num_prompt_tokens
        lack = 1 - np.maximum(cached, 0.5 * expected)
        self.prefills.cost_s = self.prefills.cost_s + self.tie_s * (lack + 0.1 * rendezvous(salts, content))
        self.encoders.break_ties(self.cluster.encoders, self.tie_s / max(1, len(self.request.media)))
        self.decodes.break_ties(self.tie_s)
