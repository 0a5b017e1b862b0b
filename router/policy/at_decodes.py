"""The part of an estimate of the workers that decode: from the first token to the end of decode's first step.

If one worker computes the prompt and decodes, nothing travels, and its next step is the first one. Else, once
decode has granted the blocks, KV travels layer by layer while prefill computes. The transfer ends at the
latest of

    first token + the last step's last layer
    first token + all new KV - prefill's own time            (prefill makes KV faster than the link takes it)
    decode's wait for blocks + all KV of the prompt that travels

Blocks that decode has in its prefix cache do not travel; those that only prefill has do. So it ends at
max(first token + after_s, before_s) for each decode worker, which is never earlier if the first token comes
later. With a codec, KV is coded layer by layer as it is sent, and decoded when all of it has arrived. A
hybrid model's states travel raw, behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.policy.at_prefills import PrefillEstimate, able_to_hold
from router.policy.cluster import ClusterView
from router.policy.pool import Floats, rendezvous
from router.policy.shared import PromptSteps, encoding_beside
from router.policy.views import RequestView


@dataclass(frozen=True, slots=True)
class KvTransferEstimate:
    """[decodes]: from one worker that computes the prompt, in one codec; terms as above. Infinite where that
    does not go."""

    codec: str
    after_s: Floats
    before_s: Floats
    first_s: Floats  # from the KV's arrival to the end of decode's first step
    is_local: bool = False  # to the same worker

    def end_s(self, ttft_s: float) -> Floats:
        """When decode's first step ends."""
        return np.maximum(ttft_s + self.after_s, self.before_s) + self.first_s


class DecodeEstimate:
    """[decodes] arrays, in seconds.

    blocks_s    until there are blocks for the prompt
    step_s      one step with the request in it
    first_s     from the arrival of KV to the end of the first step: with the prompts that are queued there,
                and half of a running step before it on average
    cost_s      delay of others: how much longer that step is, for every sequence in it. Infinite for
                workers that cannot take the request
    """

    def __init__(self, request: RequestView, cluster: ClusterView, steps: PromptSteps):
        """Raises UnavailableError and RequestError if no worker can take the request."""
        pool = cluster.decodes
        self._request = request
        self._cluster = cluster
        self._kv_transfers: dict[int, list[KvTransferEstimate]] = {}  # by the worker that computes the prompt
        self._state_bytes = cluster.state_bytes * (1 + (request.num_negative_tokens > 0))
        self.is_able = able_to_hold(request, pool, pool.is_listed, request.num_decode_blocks)
        self.num_sequences = pool.reported_units + pool.sent_units
        curve = pool.curve("decode")
        context = (pool.context_tokens + request.num_sequences * request.num_prompt_tokens) / (
            np.maximum(1.0, pool.reported_units) + request.num_sequences
        )
        per_sequence_s = curve.per_unit_s + curve.per_pair_s * context
        self.step_s = curve.fixed_s + per_sequence_s * (self.num_sequences + request.num_sequences)
        prompts_s = cluster.shared.at_decodes(steps.queued_s)
        is_busy = (self.num_sequences > 0) | (prompts_s > 0)
        self.first_s = (self.step_s + prompts_s) * np.where(is_busy, 1.5, 1.0)
        encoding = encoding_beside(cluster)
        if encoding is not None:
            self.first_s = self.first_s + np.minimum(
                self.first_s, cluster.shared.at_decodes(encoding.queue_s)
            )
        self.cost_s = np.where(
            self.is_able, per_sequence_s * request.num_sequences * self.num_sequences, np.inf
        )
        used = pool.reported_blocks + pool.sent_blocks
        used = used + cluster.shared.at_decodes(cluster.prefills.sent_blocks)
        wanted = -(-request.num_prompt_tokens // request.block_size)
        missing = np.maximum(0.0, used + wanted - pool.num_blocks)
        self.blocks_s = missing / np.maximum(1.0, used) * cluster.holding_s

    def break_ties(self, tie_s: float) -> None:
        """Among equal workers prefer the one with fewer sequences. The prompt's own worker has been chosen by
        content, so here the request id is hashed."""
        spread = rendezvous(self._cluster.decodes.salts, self._request.request_id.encode())
        load = self.num_sequences / max(1.0, float(self.num_sequences.max()))
        self.cost_s = self.cost_s + tie_s * (0.9 * load + 0.1 * spread)

    def kv_transfers(self, prefill: int, prefills: PrefillEstimate) -> list[KvTransferEstimate]:
        """To other workers per codec, if any may have the KV; to itself, if it decodes."""
        if prefill not in self._kv_transfers:
            own = int(self._cluster.shared.decode_slots[prefill])
            kv_transfers = self._to_others(prefill, own, prefills) if prefills.takes_any[prefill] else []
            self._kv_transfers[prefill] = [*kv_transfers, *([self._to_itself(own)] if own >= 0 else [])]
        return self._kv_transfers[prefill]

    def _to_itself(self, own: int) -> KvTransferEstimate:
        after_s = np.full(len(self.step_s), np.inf)
        after_s[own] = 0.0
        return KvTransferEstimate("raw", after_s, np.zeros(len(after_s)), self.step_s, is_local=True)

    def _to_others(self, prefill: int, own: int, prefills: PrefillEstimate) -> list[KvTransferEstimate]:
        links = self._cluster.kv_links.speeds
        cached = self._cluster.shared.at_decodes(prefills.num_kv_cached)
        last, new, total = self._bytes(prefills.num_uncached[prefill], prefills.max_tokens[prefill], cached)
        latency_s, s_per_byte = links.latency_s[:, prefill], links.s_per_byte[:, prefill]
        kv_transfers = []
        for name, ratio in self._cluster.codecs.items():
            encode_s, decode_s = self._codec_s(name)
            byte_s = encode_s[prefill] + ratio * s_per_byte
            end_s = latency_s + total * decode_s + self._state_bytes * s_per_byte
            after_s = end_s + np.maximum(last * byte_s, new * byte_s - prefills.work_s[prefill])
            if own >= 0:
                after_s[own] = np.inf
                if self._must_be_local(own):
                    after_s[self._cluster.shared.at_decodes(prefills.takes_any.astype(float)) > 0] = np.inf
            before_s = end_s + self.blocks_s + total * byte_s
            kv_transfers.append(KvTransferEstimate(name, after_s, before_s, self.first_s))
        return kv_transfers

    def _must_be_local(self, own: int) -> bool:
        """Whether a prompt that this decode worker computes is not sent to others that compute prompts for
        it. They hold at most half of their blocks for prompts that they send, or a single larger one
        (`cluster.engine.intake`): two workers with a larger one each, that is to be sent to the other, would
        wait for each other's blocks."""
        num_blocks = int(self._cluster.decodes.num_blocks[own])
        return bool(self.is_able[own]) and self._request.num_prefill_blocks > num_blocks // 2

    def least_cost_s(self, ttft_s: Floats, prefills: PrefillEstimate) -> Floats:
        """[prefills]: until the end of decode's first step, and the delay of others there, at best."""
        links = self._cluster.kv_links.speeds
        most_cached = float(self._cluster.shared.at_decodes(prefills.num_kv_cached).max())
        last, new, total = self._bytes(prefills.num_uncached, prefills.max_tokens, most_cached)
        least_s = np.full(len(ttft_s), np.inf)
        for name, ratio in self._cluster.codecs.items():
            encode_s, decode_s = self._codec_s(name)
            byte_s = encode_s + ratio * links.least_s_per_byte
            after_s = np.maximum(last * byte_s, new * byte_s - prefills.work_s)
            end_s = np.maximum(ttft_s + after_s, total * byte_s) + total * decode_s.min()
            end_s = end_s + self._state_bytes * links.least_s_per_byte
            least_s = np.minimum(least_s, end_s)
        least_s = least_s + links.least_latency_s + float((self.first_s + self.cost_s).min())
        itself_s = ttft_s + self._cluster.shared.at_prefills(self.step_s + self.cost_s, np.inf)
        return np.minimum(np.where(prefills.takes_any, least_s, np.inf), itself_s)

    def _codec_s(self, name: str) -> tuple[Floats, Floats]:
        """[prefills], [decodes]: seconds to code and to decode a byte of raw KV."""
        kind, cluster = f"codec {name}", self._cluster
        return cluster.prefills.curve(kind, 0.0).per_unit_s, cluster.decodes.curve(kind, 0.0).per_unit_s

    def _bytes(
        self, num_uncached: Floats, max_tokens: Floats, num_cached: Floats | float
    ) -> tuple[Floats, Floats, Floats]:
        """Bytes of the last layer of the last step, of new KV, and of all KV that travels. `num_cached`:
        tokens whose KV decode has."""
        per_token = self._cluster.kv_bytes_per_token
        num_tokens = self._request.num_prompt_tokens + self._request.num_negative_tokens
        total = np.asarray(np.maximum(0.0, num_tokens - num_cached))
        new = np.minimum(num_uncached, total)
        last = np.minimum(new, max_tokens) * per_token / self._cluster.num_layers
        return last, new * per_token, total * per_token
