"""Between a door's requests and the policy's view of them: what a request looks like from there, what was decided, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.types.media import MediaItem
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, BlocksChanged, CacheChanged, Measured, PrefillTiming
from cluster.types.request import GenerateRequest
from router.admission.queue import AdmissionTicket, Capacity, Reported
from router.flow.flight import Flight
from router.flow.streams import Launch
from router.policy import ClusterView, Decision, ItemView, Policy, RequestView, Worker

ANSWER_TOKENS = 128.0  # that an answer is thought to have, before the first has ended
FORGETTING = 0.05  # weight of a new observation


class Placing:
    """Lives on the door's event loop."""

    def __init__(self, policy: Policy, cluster: ClusterView, block_size: int):
        self.cluster = cluster
        self.block_size = block_size
        self._policy = policy
        self._answer_tokens = ANSWER_TOKENS  # of a choice, on average
        self._row_bytes = 0.0  # of embeddings, as they travel; the same at all encoders

    def add(self, member: Member) -> None:
        """It has joined, and will tell the rest itself."""
        if member.role is Role.ENCODE:
            self._row_bytes = member.block_bytes / self.block_size
        elif member.role is Role.PREFILL:
            self.cluster.kv_bytes_per_token = member.block_bytes / self.block_size
            self.cluster.num_layers = member.num_layers
        self.cluster.add(
            Worker(
                member.replica_id,
                member.role,
                member.num_blocks,
                member.hardware,
                member.modalities,
            )
        )

    def news(self, replica_id: str, message: AnyMessage) -> None:
        """What a worker says of itself."""
        if isinstance(message, CacheChanged):
            self.cluster.media_changed(replica_id, message.added, message.evicted)
        elif isinstance(message, BlocksChanged):
            self.cluster.blocks_changed(replica_id, message.added, message.evicted)
        elif isinstance(message, Measured):
            self.cluster.measured(replica_id, message.curves)

    def ticket(self, launch: Launch, class_name: Callable[[int], str], now: float) -> AdmissionTicket:
        """What admission must know of a request; `class_name`: of a priority. Raises ClusterError if nobody could serve it."""
        view = launch.view = self.view(launch.request, launch.items, launch.hashes)
        launch.decision = decision = self._policy.decide(view, self.cluster, now)
        prediction, request = decision.prediction, launch.request
        encode_s = sum(item.encode_s for item in prediction.items)
        return AdmissionTicket(
            request_id=request.request_id,
            tenant=launch.tenant,
            class_name=class_name(request.priority),
            is_text=not launch.items,
            work_s=prediction.prefill_s + encode_s,
            num_blocks=self._expected_blocks(request),
            ttft_s=prediction.high_s,
            arrived_at=launch.ledger.arrived_at,
            encode_s=encode_s,
        )

    def capacity(self) -> Capacity:
        cluster = self.cluster
        encoders, prefills, decodes = (
            pool.prefer_awake(pool.is_listed)
            for pool in (cluster.encoders, cluster.prefills, cluster.decodes)
        )
        return Capacity(
            int(encoders.sum()), int(prefills.sum()), int(cluster.decodes.num_blocks[decodes].sum())
        )

    def reported(self) -> Reported:
        """By the workers themselves, for all doors."""
        cluster = self.cluster
        encoders, prefills = cluster.encoders, cluster.prefills
        curve = prefills.curve("prefill")
        token_s = (curve.per_unit_s + curve.per_pair_s * cluster.context_tokens) * cluster.factors(prefills)
        return Reported(
            encode_s=float((encoders.reported_units * cluster.row_s()).sum()),
            prefill_s=float((prefills.reported_units * token_s).sum()),
            num_blocks=int(cluster.decodes.reported_blocks.sum()),
        )

    def place(self, launch: Launch, now: float) -> tuple[Decision, frozenset[str]]:
        """Where it goes, and which of its items have been shown before, and so will be again. Charges nothing. Raises ClusterError."""
        launch.view = launch.view or self.view(launch.request, launch.items, launch.hashes)
        returning = frozenset(
            item.media_hash
            for item in launch.items
            if item.is_returning or self.cluster.has_media(item.media_hash)
        )
        return launch.decision or self._policy.decide(launch.view, self.cluster, now), returning

    def charge(self, launch: Launch, decision: Decision, now: float) -> None:
        """It goes there now: its work counts until it has landed."""
        assert launch.view is not None
        self.cluster.started(launch.view, decision.placement, decision.prediction, now)

    def next_encoder(self, flight: Flight, item_idx: int, last: str, now: float) -> str:
        """Who encodes an item after `last` has not. Raises UnavailableError when there is nobody."""
        item = _item_view(flight.request, flight.items, item_idx, self._row_bytes)
        return self._policy.place_item(item, self.cluster, now, (last,))

    def first_token(self, flight: Flight, timing: PrefillTiming | None, now: float) -> None:
        """Of the flight. What is left of a preempted answer says nothing of predictions: its ledger is that of the first launch."""
        request_id, ledger = flight.request.request_id, flight.ledger
        self.cluster.prefilled(request_id)
        if ledger.first_token_at is None:
            encoded = ledger.timings(len(flight.items))
            self.cluster.observed(request_id, now - ledger.launched_at, encoded, timing)

    def landed(self, flight: Flight) -> None:
        """However it ended."""
        self.cluster.ended(flight.request.request_id)
        if flight.num_tokens:
            mean = flight.num_tokens / len(flight.request.sampling)
            self._answer_tokens += FORGETTING * (mean - self._answer_tokens)

    def _expected_blocks(self, request: GenerateRequest) -> int:
        """KV blocks at decode: the prompts', and those of answers that are as long as answers have been, or end where they must."""
        num_tokens = min(request.stop.max_tokens, int(self._answer_tokens))
        num_answer_blocks = -(-num_tokens // self.block_size) * len(request.sampling) * len(request.prompts)
        return request.num_prompt_blocks(self.block_size) + num_answer_blocks

    def view(
        self, request: GenerateRequest, items: Sequence[MediaItem], hashes: Sequence[bytes]
    ) -> RequestView:
        prompt, guidance = request.prompt, request.guidance
        return RequestView(
            request_id=request.request_id,
            num_prompt_tokens=len(prompt.token_ids),
            block_size=self.block_size,
            block_hashes=hashes,
            media=tuple(_item_view(request, items, idx, self._row_bytes) for idx in range(len(items))),
            num_companion_tokens=0 if guidance is None else len(guidance.negative_prompt.token_ids),
            num_sequences=len(request.sampling) * len(request.prompts),
            num_prefill_blocks=request.num_prompt_blocks(self.block_size),
            num_decode_blocks=request.max_blocks(self.block_size),
            priority=request.priority,
            waited_s=request.waited_s,
            may_prefill_locally=not items and guidance is None,
        )


def _item_view(
    request: GenerateRequest, items: Sequence[MediaItem], item_idx: int, row_bytes: float
) -> ItemView:
    item, placed = items[item_idx], request.prompt.media[item_idx]
    return ItemView(
        item.media_hash,
        item.modality,
        item.num_call_rows,
        int(item.geometry.num_tokens * row_bytes),
        placed.offset,
        placed.end,
    )
