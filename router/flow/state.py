"""The state of requests at a door: what the client asked for, and each attempt to serve it.

A `ClientRequest` lives from its submission until the last of its choices has ended or is not read any more.
An `Attempt` is one placement of it: a prompt worker, which computes the prompt, a decode worker, which may be
the same, and an encoder per media item. A request has one attempt, unless decode preempts it or a worker is
lost: then each unfinished choice goes on in an attempt of its own, whose prompt contains the tokens generated
so far; choices without a token go on together.

These objects change only what they hold; `router.flow.request_flow` decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from cluster.errors import ClusterError
from cluster.types.logprobs import TokenLogprobs
from cluster.types.media import MediaItem
from cluster.types.members import Member, Role
from cluster.types.messages import FinishReason, TokenEvent
from cluster.types.request import GenerateRequest
from cluster.types.transfer import Grant
from router.telemetry.timeline import RequestTimeline


@dataclass(eq=False)
class WorkerState:
    """One worker, as the flow sees it."""

    member: Member
    num_requests: int = 0  # attempts of this door that the worker may hold something for
    is_listed: bool = True  # Serve still names it
    is_silent: bool = False  # it has work and makes no progress: see `router.flow.watch`
    is_failing: bool = False  # attempts keep failing with it
    is_lost: bool = False  # the connection has ended

    @property
    def is_avoided(self) -> bool:
        """Placements use it only where there is no other."""
        return self.is_silent or self.is_failing

    @property
    def replica_id(self) -> str:
        return self.member.replica_id

    @property
    def role(self) -> Role:
        return self.member.role

    def add_request(self) -> None:
        """It may hold something for one more attempt."""
        self.num_requests += 1

    def drop_request(self) -> None:
        self.num_requests -= 1


@dataclass(eq=False)
class MediaItemState:
    """One media item of an attempt, until its embeddings are in the prompt worker's memory."""

    encoder: WorkerState  # the encoder that is asked for the item
    lease_id: str = ""  # of the grant that this encoder has; empty: none yet
    is_shared: bool = False  # the prompt worker needs none, has them, or gets them for another request
    num_attempts: int = 1
    is_held: bool = False  # a suspect of which the encoder was not told yet
    grant: Grant | None = None  # the prompt worker's, until an encoder is given it


class ChoiceState:
    """One choice of an attempt. Decode's tokens may overtake the first one, of the prompt worker: they wait
    for it."""

    def __init__(self) -> None:
        self.has_first_token = False  # it has come, or comes no more
        self.is_finished = False  # the last token has come
        self.is_preempted = False
        self.is_open = True  # it is still read
        self.token_ids: list[int] = []  # that the reader has been sent
        self._early: list[TokenEvent] = []

    @property
    def is_over(self) -> bool:
        """Nothing more will come for the reader from this attempt."""
        return self.is_complete or (self.has_first_token and self.is_preempted)

    @property
    def is_complete(self) -> bool:
        """The reader has been sent all of it."""
        return self.has_first_token and self.is_finished

    @property
    def is_resumable(self) -> bool:
        return self.is_open and self.is_preempted and self.has_first_token

    def arrived(self, event: TokenEvent, is_first: bool) -> Sequence[TokenEvent]:
        """What the reader gets now, in order."""
        self.is_finished |= event.finish_reason is not None
        ready: Sequence[TokenEvent] = (event,)
        if is_first:
            self.has_first_token = True
            ready, self._early = (event, *self._early), []
        elif not self.has_first_token:
            self._early.append(event)
            return ()
        for each in ready:
            self.token_ids += each.token_ids
        return ready


@dataclass(eq=False)
class ClientChoice:
    """One choice of a client's request, over all attempts."""

    attempt: Attempt | None = None  # that works for it now; None: it waits for admission or for a worker
    idx: int = 0  # of the choice in that attempt
    num_losses: int = 0  # attempts for it that failed because of a worker, and that others took over from
    is_open: bool = True  # it is still read
    has_first_token: bool = False
    is_over: bool = False  # the reader has been sent the last token, or an error

    @property
    def is_live(self) -> bool:
        """An attempt works for it, or it waits and is read."""
        if self.attempt is None:
            return self.is_open and not self.is_over
        return not self.attempt.has_landed

    def go_on_in(self, attempt: Attempt | None, idx: int = 0) -> None:
        """The choice is choice `idx` of the attempt now. None: it waits for a worker."""
        self.attempt, self.idx = attempt, idx


@dataclass(eq=False)
class ClientRequest:
    """What a client asked for. `hashes`: one per full block of the prompt."""

    request: GenerateRequest
    items: Sequence[MediaItem]
    hashes: Sequence[bytes]
    timeline: RequestTimeline
    tenant: str = ""
    started_at: float = 0.0  # of the first attempt
    num_attempts: int = 0  # since the start
    num_tokens: int = 0  # that readers have been sent, of all choices
    avoided: frozenset[str] = frozenset()  # workers, by replica id, with which an attempt failed
    choices: list[ClientChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = [ClientChoice() for _ in self.request.sampling]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_first_token(self) -> bool:
        return any(choice.has_first_token for choice in self.choices)

    def count_attempt(self) -> None:
        self.num_attempts += 1

    def takes(self, choice_idx: int, event: TokenEvent | ClusterError) -> bool:
        """Whether a choice's reader gets this event: it reads, and has not been sent the end."""
        choice = self.choices[choice_idx]
        if not choice.is_open or choice.is_over:
            return False
        if isinstance(event, ClusterError):
            choice.is_over = True
        else:
            choice.has_first_token = True
            choice.is_over = event.finish_reason is not None
            self.num_tokens += len(event.token_ids)
        return True

    def waited_s(self, now: float) -> float:
        """Seconds since the client asked. Workers order requests by it, wherever the time has passed."""
        return now - self.timeline.arrived_at

    def request_at(self, now: float) -> GenerateRequest:
        """The request, with the time that it has waited."""
        return msgspec.structs.replace(self.request, waited_s=self.waited_s(now))


class Attempt:
    """One placement of a request, or of what is left of one choice after a preemption."""

    def __init__(
        self,
        *,
        client: ClientRequest,
        request: GenerateRequest,
        choice_idxs: Sequence[int],
        encoders: Sequence[WorkerState],
        prompt_worker: WorkerState,
        decode: WorkerState,
        codec: str,
        returning: frozenset[str],
        content: Hashable,
        started_at: float,
        cached: tuple[int, ...] = (),
    ):
        """`choice_idxs`: the client's choice for each choice of `request`. `codec`: of the KV on the wire.
        `cached`: items whose tokens the prompt worker is expected to have in its prefix cache.
        `returning`: hashes of items that were shown before, and so are expected again. `content`: see
        `router.flow.quarantine`."""
        self.client = client
        self.request = request
        self.items = client.items
        self.choice_idxs = choice_idxs
        # Of equal items only the first is sent, and cached ones are not: the prompt worker has, or shares,
        # what they bring, or grants them room after all.
        self.cached = cached
        hashes = [item.media_hash for item in client.items]
        self.media = [
            MediaItemState(encoder, is_shared=idx in cached or hashes[idx] in hashes[:idx])
            for idx, encoder in enumerate(encoders)
        ]
        self.prompt_worker = prompt_worker
        self.decode = decode
        self.codec = codec
        self.returning = returning
        self.content = content
        self.started_at = started_at
        self.choices = [ChoiceState() for _ in request.sampling]
        # Items whose embeddings are not with the prompt worker
        self.unencoded = set(range(len(self.items))).difference(cached)
        self.has_memory = False  # at the prompt worker, if that is not decode
        self.num_tokens = 0  # that have come, of all choices
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()  # once they have come, if they are wanted
        self.has_decode_spoken = False
        # Decode holds nothing for it any more, and so the prompt worker does not either
        self.is_over_at_decode = False
        self.has_failed = False
        self.failure: ClusterError | None = None  # it has failed, and another attempt may go on with it
        self.blamed: Sequence[WorkerState] = ()  # for the failure
        self.has_landed = False  # every worker has been told to let go
        # That may hold something for it
        self.workers = [*dict.fromkeys([decode, prompt_worker, *encoders])]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_losses(self) -> int:
        """How many attempts each of its choices has lost before. Choices of one attempt have shared all
        earlier ones."""
        return self.client.choices[self.choice_idxs[0]].num_losses

    @property
    def is_local(self) -> bool:
        """One worker computes the prompt and generates the answer."""
        return self.prompt_worker is self.decode

    @property
    def has_first_token(self) -> bool:
        return all(choice.has_first_token for choice in self.choices)

    @property
    def is_read(self) -> bool:
        return any(choice.is_open for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """It has failed, or all that readers wait for has come."""
        return self.has_failed or all(choice.is_over for choice in self.choices if choice.is_open)

    def needs(self, worker: WorkerState) -> bool:
        """Whether the answer still depends on the worker: on the prompt worker until decode has the KV and
        the first tokens are here. Encoders can be replaced: see `router.flow.media`."""
        if worker is self.decode:
            return not self.is_over_at_decode
        return worker is self.prompt_worker and not (self.has_decode_spoken and self.has_first_token)

    def fail(self, failure: ClusterError | None = None, blamed: Sequence[WorkerState] = ()) -> None:
        """`failure`: another attempt may go on with what is left."""
        self.has_failed, self.failure, self.blamed = True, failure, blamed

    def move_item(self, item_idx: int, encoder: WorkerState) -> None:
        """Asks this encoder for the item instead."""
        self.media[item_idx].encoder = encoder
        if encoder not in self.workers:
            self.workers.append(encoder)
            encoder.add_request()

    def item_arrived(self, item_idx: int) -> None:
        """The item's embeddings are with the prompt worker, or come for another request."""
        self.unencoded.discard(item_idx)

    def item_missing(self, item_idx: int) -> None:
        """An encoder is asked for the item once more. The one before may have sent it."""
        self.unencoded.add(item_idx)

    def on_tokens(self, worker: WorkerState, event: TokenEvent) -> Sequence[TokenEvent]:
        """What the reader of the choice gets now. The events of one worker arrive in order; the prompt
        worker's first one has the first token. What it tells of the prompt goes to every choice."""
        if event.finish_reason is FinishReason.CANCELLED:
            return ()
        self.num_tokens += len(event.token_ids)
        choice = self.choices[event.choice_idx]
        is_first = worker is self.prompt_worker and not choice.has_first_token
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        if is_first and self.prompt_logprobs:
            event = msgspec.structs.replace(event, prompt_logprobs=self.prompt_logprobs)
        ready = choice.arrived(event, is_first)
        if worker is self.decode:
            self.has_decode_spoken = True
            if event.finish_reason is not None:
                self.is_over_at_decode = all(choice.is_finished for choice in self.choices)
        return ready

    def on_preempted(self) -> None:
        self.has_decode_spoken = self.is_over_at_decode = True
        for choice in self.choices:
            choice.is_preempted = not choice.is_finished
            choice.has_first_token |= self.is_local  # no other worker sends one
