"""The decode workers' part of an estimate: from the first token to the end of decode's first step; and local
prefill, where the decode worker computes the prompt itself.

Once decode has granted the blocks, KV travels layer by layer while prefill computes. The transfer ends at the
latest of

    first token + the last step's last layer
    first token + all new KV - prefill's own time            (prefill makes KV faster than the link takes it)
    decode's wait for blocks + all KV of the prompt          (cached blocks travel, too)

So it ends at max(first token + after_s, before_s) for each decode worker, which is never earlier if the first
token comes later. With a codec, KV is coded layer by layer as it is sent, and decoded when all of it has
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.policy.at_prefills import PrefillEstimate, able_to_hold
from router.policy.calibration import Kind
from router.policy.cluster import ClusterView
from router.policy.pool import Floats, rendezvous
from router.policy.views import RequestView

LOCAL_PREFILL_STEP_S = 0.05  # local prefill between two decode steps


@dataclass(frozen=True, slots=True)
class KvTransferEstimate:
    """[decodes]: the transfer of a prompt's KV from one prefill worker, in one codec; terms as above."""

    codec: str
    after_s: Floats
    before_s: Floats

    def end_s(self, ttft_s: float) -> Floats:
        return np.maximum(ttft_s + self.after_s, self.before_s)


class DecodeEstimate:
    """[decodes] arrays, in seconds.

    blocks_s    until there are blocks for the prompt
    step_s      one step with the request in it
    first_s     from the KV's arrival to the end of the first step, with half of a running step before it on
                average
    cost_s      delay of others: how much longer that step is, for every sequence in it
    """

    def __init__(self, request: RequestView, cluster: ClusterView):
        """Raises UnavailableError and RequestError if no worker can take the request."""
        pool = cluster.decodes
        self._request = request
        self._cluster = cluster
        self._kv_transfers: dict[int, list[KvTransferEstimate]] = {}  # by prefill worker
        self.is_able = able_to_hold(pool, request.num_decode_blocks, request.block_size)
        self.num_sequences = pool.reported_units + pool.sent_units
        curve = pool.curve("decode")
        context = (pool.context_tokens + request.num_sequences * request.num_prompt_tokens) / (
            np.maximum(1.0, pool.reported_units) + request.num_sequences
        )
        per_sequence_s = curve.per_unit_s + curve.per_pair_s * context
        self.step_s = curve.fixed_s + per_sequence_s * (self.num_sequences + request.num_sequences)
        self.first_s = self.step_s * np.where(self.num_sequences > 0, 1.5, 1.0)
        self.cost_s = per_sequence_s * request.num_sequences * self.num_sequences
        used = pool.reported_blocks + pool.sent_blocks
        wanted = -(-request.num_prompt_tokens // request.block_size)
        missing = np.maximum(0.0, used + wanted - pool.num_blocks)
        self.blocks_s = missing / np.maximum(1.0, used) * cluster.holding_s

    def break_ties(self, tie_s: float) -> None:
        """Among equal workers prefer the one with fewer sequences. Decode caches nothing, so the request id
        is hashed, not the content."""
        spread = rendezvous(self._cluster.decodes.salts, self._request.request_id.encode())
        load = self.num_sequences / max(1.0, float(self.num_sequences.max()))
        self.cost_s = self.cost_s + tie_s * (0.9 * load + 0.1 * spread)

    @property
    def score_s(self) -> Floats:
        """The cost that a decode worker adds, wherever the prompt is computed. Infinite if it is unable."""
        return np.where(self.is_able, self.first_s + self.cost_s, np.inf)

    def kv_transfers(self, prefill: int, prefills: PrefillEstimate) -> list[KvTransferEstimate]:
        """Per codec."""
        if prefill not in self._kv_transfers:
            self._kv_transfers[prefill] = self._estimate_kv_transfers(prefill, prefills)
        return self._kv_transfers[prefill]

    def _estimate_kv_transfers(self, prefill: int, prefills: PrefillEstimate) -> list[KvTransferEstimate]:
        links = self._cluster.kv_links.speeds
        last, new, total = self._bytes(prefills.num_uncached[prefill], prefills.step_units[prefill])
        latency_s, s_per_byte = links.latency_s[:, prefill], links.s_per_byte[:, prefill]
        kv_transfers = []
        for name, ratio in self._cluster.codecs.items():
            encode_s, decode_s = self._codec_s(name)
            byte_s = encode_s[prefill] + ratio * s_per_byte
            end_s = latency_s + total * decode_s
            after_s = end_s + np.maximum(last * byte_s, new * byte_s - prefills.work_s[prefill])
            kv_transfers.append(KvTransferEstimate(name, after_s, end_s + self.blocks_s + total * byte_s))
        return kv_transfers

    def least_end_s(self, ttft_s: Floats, prefills: PrefillEstimate) -> Floats:
        """[prefills]: when the KV is complete at some decode worker, at best."""
        links = self._cluster.kv_links.speeds
        last, new, total = self._bytes(prefills.num_uncached, prefills.step_units)
        least_s = np.full(len(ttft_s), np.inf)
        for name, ratio in self._cluster.codecs.items():
            encode_s, decode_s = self._codec_s(name)
            byte_s = encode_s + ratio * links.least_s_per_byte
            after_s = np.maximum(last * byte_s, new * byte_s - prefills.work_s)
            end_s = np.maximum(ttft_s + after_s, total * byte_s) + total * decode_s.min()
            least_s = np.minimum(least_s, end_s)
        return least_s + links.least_latency_s

    def _codec_s(self, name: str) -> tuple[Floats, Floats]:
        """[prefills], [decodes]: seconds to code and to decode a byte of raw KV."""
        kind, cluster = f"codec {name}", self._cluster
        return cluster.prefills.curve(kind, 0.0).per_unit_s, cluster.decodes.curve(kind, 0.0).per_unit_s

    def _bytes(self, num_uncached: Floats, step_units: Floats) -> tuple[Floats, Floats, float]:
        """Bytes of the last layer of the last step, of new KV, and of all KV."""
        per_token = self._cluster.kv_bytes_per_token
        num_tokens = self._request.num_prompt_tokens + self._request.num_negative_tokens
        last = np.minimum(num_uncached, step_units) * per_token / self._cluster.num_layers
        return last, num_uncached * per_token, num_tokens * per_token


class LocalPrefillEstimate:
    """[decodes] arrays, in seconds: local prefill, in chunks between decode steps. Infinite where a worker
    cannot do it.

    queue_s      wait for blocks, half a step, and the local prefills that wait there
    prefill_s    the prompt, with the decode steps between its chunks; its last chunk gives the first token
    cost_s       delay of others: the prompt's time, for every sequence that runs there, and once more for a
                 later request with the same prompt, which will find it cached nowhere
    """

    def __init__(self, request: RequestView, cluster: ClusterView, decodes: DecodeEstimate):
        pool = cluster.local_prefills
        curve, factors = pool.own_curve("prefill"), cluster.factors(pool)
        num_tokens = float(request.num_prompt_tokens)
        is_able = decodes.is_able & ~np.isnan(curve.fixed_s)
        fixed_s, per_token_s, per_pair_s = np.nan_to_num(np.array(curve)) * factors
        per_token_s = per_token_s + per_pair_s * np.maximum(0.0, num_tokens - pool.step_units) / 2
        pace = np.where(decodes.num_sequences > 0, 1 + decodes.step_s / LOCAL_PREFILL_STEP_S, 1.0)
        work_s = fixed_s + num_tokens * per_token_s
        queued_s = pool.sent_units * per_token_s * pace
        half_step_s = np.where(decodes.num_sequences > 0, 0.5 * decodes.step_s, 0.0)
        begin_s = cluster.overhead_s + decodes.blocks_s + half_step_s + queued_s
        residual = cluster.residual(Kind.LOCAL_PREFILL)
        self.queue_s = np.where(is_able, residual * begin_s, np.inf)
        self.prefill_s = residual * work_s * pace
        self.cost_s = work_s * (decodes.num_sequences + 1) + decodes.cost_s

    def score_s(self, decodes: DecodeEstimate) -> Floats:
        """Cost of the whole placement."""
        return self.queue_s + self.prefill_s + decodes.step_s + self.cost_s
