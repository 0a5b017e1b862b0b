"""Which prompts get memory next, if media requests also wait for room for their embeddings.

There are two class queues:
* Text requests are ordered by virtual deadline.
* Media requests keep their order of arrival, because room for embeddings is given in that order, too. If two
  resources are given in one order, requests cannot wait for each other in a circle. A media request that
  cannot be tried yet has its place all the same (`keep_place`).

Of the two heads, the more urgent one goes first. No request overtakes it, with one exception: after a media
request that must wait, text requests may go on as long as text holds less than `text_share` of the blocks and
leaves as many blocks as the media request needs. On the other side, media never holds more than the rest of
the blocks, unless a single request is larger. So a pool full of videos that are still being encoded does not
keep text out. And what text may take while a video waits is bounded, so the video gets its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key
from cluster.scheduling.queue import WaitingQueue


class PromptAdmission:
    """Counts the blocks of the requests that were admitted, by class."""

    def __init__(self, policy: SchedulingPolicy, num_blocks: int):
        self._policy = policy
        self._num_blocks = num_blocks
        self._text_blocks = int(policy.text_share * num_blocks)
        self._media_blocks = num_blocks - self._text_blocks
        self._text = WaitingQueue(policy)
        self._media: OrderedDict[str, tuple[Ticket, int]] = OrderedDict()  # with the blocks that it needs
        self._unready: set[str] = set()  # ids of media requests that have a place and were not pushed yet
        self._num_text_held = 0
        self._num_media_held = 0
        self._held: dict[str, tuple[bool, int]] = {}  # request id → (is text, blocks)

    def keep_place(self, ticket: Ticket, num_blocks: int) -> None:
        """The request has come, and `push` follows when what it needs besides memory is ready. If it has
        media, no younger request with media goes before it. Text keeps no place."""
        if not ticket.is_text:
            self._media[ticket.request_id] = ticket, num_blocks
            self._unready.add(ticket.request_id)

    def push(self, ticket: Ticket, num_blocks: int) -> None:
        """The request waits for nothing but memory: for so many blocks, some of which may be cached."""
        if ticket.is_text:
            self._text.push(ticket)
        else:
            self._media[ticket.request_id] = ticket, num_blocks  # a place that was kept stays
            self._unready.discard(ticket.request_id)

    def heads(self) -> list[Ticket]:
        """Requests that may be tried now, in this order. Try the second one only if the first one cannot be
        admitted."""
        text = self._text.peek() if self._text else None
        if not self._media:
            return [] if text is None else [text]
        media, _ = self._first_media()
        if text is not None and not self._passes_media(text):
            return [text]
        first = [] if media.request_id in self._unready else [media]
        return first if text is None or self._num_text_held >= self._text_blocks else [*first, text]

    def has_share(self, ticket: Ticket, num_blocks: int) -> bool:
        """Whether the class of the ticket may have this many more blocks, whatever is free in the pool."""
        if not ticket.is_text:
            return self._num_media_held == 0 or self._num_media_held + num_blocks <= self._media_blocks
        if not self._passes_media(ticket):
            return True
        _, num_waited_for = self._first_media()
        return self._num_text_held + num_blocks + num_waited_for <= self._num_blocks

    def _first_media(self) -> tuple[Ticket, int]:
        return next(iter(self._media.values()))

    def _passes_media(self, text: Ticket) -> bool:
        """Whether a more urgent request with media waits."""
        if not self._media:
            return False
        return order_key(self._first_media()[0], self._policy) < order_key(text, self._policy)

    def admit(self, ticket: Ticket, num_blocks: int) -> None:
        """The request has got its blocks."""
        self.remove(ticket.request_id)
        self._held[ticket.request_id] = (ticket.is_text, num_blocks)
        self._count(ticket.is_text, num_blocks)

    def remove(self, request_id: str) -> None:
        """The request has ended, admitted or not. Unknown requests are ignored."""
        self._text.remove(request_id)
        self._media.pop(request_id, None)
        self._unready.discard(request_id)
        is_text, num_blocks = self._held.pop(request_id, (True, 0))
        self._count(is_text, -num_blocks)

    def _count(self, is_text: bool, num_blocks: int) -> None:
        if is_text:
            self._num_text_held += num_blocks
        else:
            self._num_media_held += num_blocks


def heads(computed: PromptAdmission, arrivals: WaitingQueue, may_send: Callable[[str], bool]) -> list[Ticket]:
    """Requests that may be tried now, in this order: of those whose prompts are computed here, and of those
    whose KV arrives. `may_send(request_id)`: whether blocks may be held for a prompt that is sent
    elsewhere."""
    first = computed.heads()
    if not arrivals:
        return first
    arrival = arrivals.peek()
    if not first or arrivals.is_before(arrival, first[0]):
        return [arrival]
    # The workers that have computed an arrival's prompts hold memory for it. If prompts that are sent to
    # them hold ours, it must not wait for these.
    return first if may_send(first[0].request_id) else [*first, arrival]
