"""One request on its way, as its door sees it: who works on it, what has come for each choice. `router.flow.dispatch` flies it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.types.media import MediaItem
from cluster.types.messages import FinishReason, TokenEvent
from cluster.types.request import GenerateRequest
from cluster.types.transfer import Grant
from router.members import Peer
from router.telemetry.timeline import RequestTimeline


@dataclass(eq=False)
class Errand:
    """One media item on its way into prefill's memory."""

    encoder: Peer  # who is asked for it
    lease_id: str = ""  # that encoder has been told where the embeddings go: with this lease
    is_shared: bool = False  # prefill has them, or gets them, for another request
    num_attempts: int = 1
    is_held: bool = False  # it waits until no other suspect is at its encoder: nothing has been sent there
    grant: Grant | None = None  # prefill's, while it is held


class Resume:
    """In a choice's queue: decode has forgotten the request."""


class _Line:
    """What has come for one choice. Decode's first tokens may overtake prefill's: they wait for it."""

    def __init__(self, has_first_token: bool) -> None:
        """`has_first_token`: there is none to wait for but decode's own."""
        self.queue: asyncio.Queue[TokenEvent | ClusterError | Resume] = asyncio.Queue()
        self.has_first_token = has_first_token
        self.is_finished = False  # its last token has come
        self.is_preempted = False
        self._early: list[TokenEvent | Resume] = []

    @property
    def is_over(self) -> bool:
        """All that will come is in the queue."""
        return self.has_first_token and (self.is_finished or self.is_preempted)

    def first(self, event: TokenEvent) -> None:
        self.has_first_token = True
        for known in (event, *self._early):
            self.queue.put_nowait(known)

    def next(self, item: TokenEvent | Resume) -> None:
        if self.has_first_token:
            self.queue.put_nowait(item)
        else:
            self._early.append(item)


class Flight:
    """State of one request at the door."""

    def __init__(
        self,
        request: GenerateRequest,
        items: Sequence[MediaItem],
        ledger: RequestTimeline,
        encoders: list[Peer],
        prefill: Peer | None,
        decode: Peer,
        codec: str = "raw",
        returning: frozenset[str] = frozenset(),
        content: Hashable = None,
    ):
        """`prefill`: None if decode computes the prompt. `codec`: of its KV on the wire. `returning`: media hashes of items that have
        been shown before, and so will be again. `content`: see `router.flow.quarantine`."""
        self.request = request
        self.items = items
        self.ledger = ledger
        self.errands = [Errand(encoder) for encoder in encoders]  # per media item
        self.prefill = prefill
        self.decode = decode
        self.codec = codec
        self.returning = returning
        self.content = content
        self.has_decode_spoken = False
        self.is_over_at_decode = False  # decode holds nothing for it any more, and so prefill does not either
        self.has_landed = False
        self.num_tokens = 0  # that have come, of all choices
        self.open_choices = set(range(len(request.sampling)))  # that somebody still reads
        self.has_failed = False
        language = [decode] if prefill is None else [decode, prefill]
        self.encoding = set(range(len(items)))  # items whose embeddings are not with prefill
        self.peers = [*dict.fromkeys([*language, *encoders])]  # that may hold something for it
        self._lines = [_Line(has_first_token=prefill is None) for _ in request.sampling]

    @property
    def has_first_token(self) -> bool:
        return all(line.has_first_token for line in self._lines)

    @property
    def is_over(self) -> bool:
        """It has failed, or all that readers wait for has come."""
        return self.has_failed or all(self._lines[choice_idx].is_over for choice_idx in self.open_choices)

    def is_finished(self, choice_idx: int) -> bool:
        return self._lines[choice_idx].is_finished

    def needs(self, peer: Peer) -> bool:
        """Whether the answer still depends on a language worker: on prefill until decode has the KV, and its first tokens are here. One
        that gives up or is lost later costs the client nothing. Encoders are replaceable: see `router.flow.encoding`."""
        if peer is self.decode:
            return not self.is_over_at_decode
        return peer is self.prefill and not (self.has_decode_spoken and self.has_first_token)

    def move_item(self, item_idx: int, encoder: Peer) -> None:
        """From now on this encoder is asked for the item."""
        self.errands[item_idx].encoder = encoder
        if encoder not in self.peers:
            self.peers.append(encoder)
            encoder.num_flights += 1

    def on_tokens(self, peer: Peer, event: TokenEvent) -> None:
        """Per choice the events of one worker arrive in order. Prefill's is the first token, if it has a part in the request."""
        if event.finish_reason is FinishReason.CANCELLED:
            return
        self.num_tokens += len(event.token_ids)
        line = self._lines[event.choice_idx]
        line.is_finished |= event.finish_reason is not None
        if peer is self.prefill and not line.has_first_token:
            line.first(event)
            return
        line.next(event)
        if peer is self.decode:
            self.has_decode_spoken = True
            self.is_over_at_decode = all(line.is_finished for line in self._lines)

    def on_preempted(self) -> None:
        self.has_decode_spoken = self.is_over_at_decode = True
        for line in self._lines:
            if not line.is_finished:
                line.is_preempted = True
                line.next(Resume())

    def fail(self, error: ClusterError) -> None:
        self.has_failed = True
        for line in self._lines:
            line.queue.put_nowait(error)

    async def next_event(self, choice_idx: int) -> TokenEvent | Resume:
        """Raises what ended the request."""
        event = await self._lines[choice_idx].queue.get()
        if isinstance(event, ClusterError):
            raise event
        return event
