"""Between the requests of a door and the routing policy: what the policy sees of a request, what it decided,
what came of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kvcache.hashing import snapshot_key
from cluster.types.media import MediaItem
from cluster.types.members import Member
from cluster.types.messages import (
    AdaptersHeld,
    AnyMessage,
    BlocksChanged,
    CacheChanged,
    Measured,
    PhasesAssigned,
)
from cluster.types.request import GenerateRequest
from cluster.types.timings import PrefillTiming
from router.admission.queue import AdmissionTicket, Capacity, Reported
from router.flow.state import Attempt, ClientRequest
from router.policy import (
    ClusterView,
    Decision,
    ItemView,
    Policy,
    Prediction,
    RequestView,
    Worker,
    free_shares,
)
from router.policy.encoder_media import row_s

ANSWER_TOKENS = 128.0  # expected of an answer before the first has ended
FORGETTING = 0.05  # weight of a new observation


class Placer:
    def __init__(self, policy: Policy, cluster: ClusterView, block_size: int):
        self.cluster = cluster
        self.block_size = block_size
        self._policy = policy
        self._answer_tokens = ANSWER_TOKENS  # of a choice, on average
        self._state_blocks = 0  # of a sequence's state; the same at all workers
        self._row_bytes = 0  # of embeddings, as they travel; the same at all encoders

    def add(self, member: Member) -> None:
        """It has joined, and will tell the rest itself."""
        if member.role.encodes:
            self._row_bytes = member.row_bytes
        if member.role.prefills:
            self.cluster.kv_bytes_per_token = member.block_bytes / self.block_size
            self.cluster.num_layers = member.num_layers
        if member.role.decodes or member.role.prefills:
            self._state_blocks = member.state_blocks
            self.cluster.state_bytes = float(member.state_blocks * member.block_bytes)
        self.cluster.add(
            Worker(
                member.replica_id,
                member.role,
                member.num_blocks,
                member.hardware,
                member.modalities,
                member.device,
            )
        )

    def on_message(self, replica_id: str, message: AnyMessage) -> None:
        """What a worker says of itself."""
        if isinstance(message, CacheChanged):
            self.cluster.media_changed(replica_id, message.added, message.evicted)
        elif isinstance(message, BlocksChanged):
            self.cluster.blocks_changed(replica_id, message.added, message.evicted)
        elif isinstance(message, Measured):
            self.cluster.measured(replica_id, message.curves, is_of_encoder=message.is_of_encoder)
        elif isinstance(message, PhasesAssigned):
            self.cluster.assign(replica_id, message.phases)
        elif isinstance(message, AdaptersHeld):
            self.cluster.adapters_changed(replica_id, message.held)

    def decide(
        self, client: ClientRequest, request: GenerateRequest, hashes: Sequence[bytes], now: float
    ) -> tuple[RequestView, Decision]:
        """Where the client's request goes, or, as `request`, the rest of some of its choices; and what the
        policy saw of it. `hashes`: one per full block of the prompt. Charges nothing. Raises ClusterError if
        no worker can serve it."""
        view = self._view(client, request, hashes)
        return view, self._policy.decide(view, self.cluster, now)

    def ticket(self, client: ClientRequest, prediction: Prediction, class_name: str) -> AdmissionTicket:
        """What admission must know of a request of this class."""
        request = client.request
        encode_s = sum(item.work_s for item in prediction.items)
        return AdmissionTicket(
            request_id=request.request_id,
            tenant=client.tenant,
            class_name=class_name,
            is_text=not client.items,
            work_s=prediction.work_s + encode_s,
            num_blocks=self._expected_blocks(request),
            ttft_s=prediction.high_s,
            arrived_at=client.timeline.arrived_at,
            encode_s=encode_s,
        )

    def capacity(self) -> Capacity:
        cluster, shared = self.cluster, self.cluster.shared
        encoders, prefills, decodes = (
            pool.preferred(is_able)
            for pool, is_able in (
                (cluster.encoders, cluster.encoders.is_listed),
                (cluster.prefills, cluster.prefills.is_listed & cluster.prefills.takes_any),
                (cluster.decodes, cluster.decodes.is_listed),
            )
        )
        shares = free_shares(cluster)
        return Capacity(
            float(shared.of_prompts(shares, otherwise=1.0)[encoders].sum()),
            float(shares[prefills].sum()),
            int(cluster.decodes.num_blocks[decodes].sum()),
            float((shares * shared.of_encoders(encoders.astype(float)))[prefills].sum()),
        )

    def reported(self) -> Reported:
        """By the workers themselves, for all doors."""
        cluster = self.cluster
        encoders, prefills = cluster.encoders, cluster.prefills
        curve = prefills.curve("prefill")
        token_s = (curve.per_unit_s + curve.per_pair_s * cluster.context_tokens) * cluster.factors(prefills)
        return Reported(
            encode_s=float((encoders.reported_units * row_s(encoders)).sum()),
            prefill_s=float((prefills.reported_units * token_s).sum()),
            num_blocks=int(cluster.decodes.reported_blocks.sum()),
        )

    def returning(self, items: Sequence[MediaItem]) -> frozenset[str]:
        """Hashes of the items that have been shown before, and so are expected again."""
        return frozenset(
            item.media_hash for item in items if item.is_returning or self.cluster.has_media(item.media_hash)
        )

    def cached_items(self, view: RequestView, replica_id: str) -> tuple[int, ...]:
        """Whose tokens the worker has in its prefix cache, as far as this door knows."""
        num_tokens = self.cluster.num_cached_tokens(view, replica_id) if view.media else 0
        return tuple(idx for idx, item in enumerate(view.media) if item.end <= num_tokens)

    def charge(self, view: RequestView, decision: Decision, now: float) -> None:
        """The request goes there now: its work counts until it has landed."""
        self.cluster.started(view, decision.placement, decision.prediction, now)

    def next_encoder(self, attempt: Attempt, item_idx: int, last: str, now: float) -> str:
        """The encoder for an item that `last` has not encoded. Raises UnavailableError if there is no
        other."""
        item = _item_view(attempt.request, attempt.items, item_idx, self._row_bytes)
        return self._policy.place_item(item, self.cluster, now, (last,))

    def first_token(self, attempt: Attempt, timing: PrefillTiming | None, now: float) -> None:
        """Notes the first token of the attempt. A later attempt does not test predictions: the timeline is
        that of the first."""
        request_id, client = attempt.request_id, attempt.client
        self.cluster.prefilled(request_id)
        if not client.has_first_token:
            encoded = client.timeline.timings(len(attempt.items))
            self.cluster.observed(request_id, now - attempt.started_at, encoded, timing)

    def landed(self, attempt: Attempt) -> None:
        """However the attempt ended."""
        self.cluster.ended(attempt.request_id)
        if attempt.num_tokens:
            mean = attempt.num_tokens / len(attempt.choices)
            self._answer_tokens += FORGETTING * (mean - self._answer_tokens)

    def _expected_blocks(self, request: GenerateRequest) -> int:
        """KV blocks at decode: of prompts, states, and answers that are as long as answers have been, or
        end where they must."""
        num_tokens = min(request.stop.max_tokens, int(self._answer_tokens))
        num_answer_blocks = -(-num_tokens // self.block_size) * len(request.sampling) * len(request.prompts)
        num_states = request.num_state_blocks(self._state_blocks)
        return request.num_prompt_blocks(self.block_size) + num_answer_blocks + num_states

    def _view(self, client: ClientRequest, request: GenerateRequest, hashes: Sequence[bytes]) -> RequestView:
        """A prompt that is scored uses no cached prefix."""
        prompt, guidance, items = request.prompt, request.guidance, client.items
        hashes = hashes if request.num_prompt_logprobs is None else ()
        return RequestView(
            request_id=request.request_id,
            num_prompt_tokens=len(prompt.token_ids),
            block_size=self.block_size,
            block_hashes=hashes,
            snapshots=tuple(map(snapshot_key, hashes)) if self._state_blocks else (),
            media=tuple(_item_view(request, items, idx, self._row_bytes) for idx in range(len(items))),
            num_negative_tokens=0 if guidance is None else len(guidance.negative_prompt.token_ids),
            num_sequences=len(request.sampling) * len(request.prompts),
            num_prefill_blocks=request.num_prompt_blocks(self.block_size, self._state_blocks),
            num_decode_blocks=request.max_blocks(self.block_size, state_blocks=self._state_blocks),
            priority=request.priority,
            waited_s=request.waited_s,
            adapter=prompt.adapter,
            avoided=client.avoided,
        )


def _item_view(
    request: GenerateRequest, items: Sequence[MediaItem], item_idx: int, row_bytes: int
) -> ItemView:
    item, placed = items[item_idx], request.prompt.media[item_idx]
    return ItemView(
        item.media_hash,
        item.modality,
        item.num_call_rows,
        item.geometry.num_tokens * row_bytes,
        placed.offset,
        placed.end,
    )
