"""The client's side of a simulated request: what it asks of a door, and what it notes of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from cluster.kvcache.hashing import block_hashes
from cluster.types.media import MediaGeometry, MediaItem, PlacedMedia
from cluster.types.messages import TokenEvent
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from deploy.simulator.results import Outcome
from deploy.simulator.workload import Item, SimRequest
from router.flow.state import ClientRequest
from router.policy import Prediction
from router.telemetry.timeline import RequestTimeline

SAMPLING = (SamplingParams(),)
OWN_TOKENS = 1 << 60  # token ids from here on belong to a single request


@dataclass(eq=False, slots=True)
class SimClient:
    """One request, from its arrival until its last token or its error."""

    request: SimRequest
    asked: ClientRequest
    ttft_s: float | None = None
    second_s: float = 0.0  # from the arrival to the second token
    decided_ttft_s: float = 0.0
    num_cached: int = 0
    prediction: Prediction | None = None

    def on_tokens(self, event: TokenEvent, now: float) -> None:
        since_s = now - self.request.arrived_at
        if self.ttft_s is not None:
            if not self.second_s:
                self.second_s = since_s
            return
        self.ttft_s = since_s
        self.decided_ttft_s = now - self.asked.started_at
        self.num_cached = event.num_cached_tokens
        decision = self.asked.timeline.decision
        self.prediction = None if decision is None else decision.prediction

    def outcome(self, status: str, now: float) -> Outcome:
        """What came of the request, at its end."""
        request, num_attempts = self.request, self.asked.num_attempts
        waited_s = self.asked.started_at - request.arrived_at if num_attempts else 0.0
        if self.ttft_s is None:
            return Outcome(
                request=request, status=status, waited_s=waited_s, finished_at=now, num_attempts=num_attempts
            )
        return Outcome(
            request=request,
            status=status,
            waited_s=waited_s,
            ttft_s=self.ttft_s,
            second_s=self.second_s,
            finished_at=now,
            tpot_s=(now - request.arrived_at - self.ttft_s) / max(1, request.num_output_tokens - 1),
            num_attempts=num_attempts,
            num_cached=self.num_cached,
            decided_ttft_s=self.decided_ttft_s,
            prediction=self.prediction,
        )


def name_of(request_id: str) -> str:
    """The name of the workload's request, from the name of any of its attempts: the first one of "r5" is
    "r5/1", the second one "r5/1.1", and so on."""
    return request_id.partition("/")[0]


def make_client(request: SimRequest, door: int, number: int, block_size: int) -> SimClient:
    """`number`: of the request at its door."""
    placed, items = [], []
    for each in request.media:
        geometry = MediaGeometry(each.num_tokens)
        placed.append(PlacedMedia(each.modality, each.media_hash, ((each.start, each.num_tokens),), geometry))
        items.append(_media_item(each, geometry))
    prompt = Prompt(_token_ids(request, door, number, block_size), tuple(placed))
    asked = GenerateRequest(
        f"{request.request_id}/1",
        prompt,
        SAMPLING,
        StopParams(request.num_output_tokens),
        priority=request.priority,
    )
    hashes, timeline = block_hashes(prompt, block_size), RequestTimeline(request.arrived_at)
    return SimClient(request, ClientRequest(asked, items, hashes, timeline, request.tenant))


def _token_ids(request: SimRequest, door: int, number: int, block_size: int) -> tuple[int, ...]:
    """Blocks of equal keys have equal tokens; those without a key are the request's own."""
    token_ids: list[int] = []
    for key in request.block_keys:
        token_ids += [int.from_bytes(blake2b(key, digest_size=7).digest())] * block_size
    own = OWN_TOKENS + (door << 32) + number
    return (*token_ids, *[own] * (request.num_prompt_tokens - len(token_ids)))


def _media_item(item: Item, geometry: MediaGeometry) -> MediaItem:
    return MediaItem(item.modality, b"", item.media_hash, geometry, num_encoded_rows=item.num_rows)
