"""Requests that wait for room, the most urgent first.

A binary heap over static keys. A removed entry stays in the heap until it comes to the top, or until dead
entries outnumber live entries; then the heap is rebuilt. So memory is O(waiting) and every call O(log n)
amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from cluster.scheduling.keys import OrderKey, SchedulingPolicy, Ticket, order_key

MIN_DEAD_ENTRIES = 64  # with fewer, a rebuild is not worth its cost


class WaitingQueue:
    """Order: virtual deadline, then arrival, then the order of `push`."""

    def __init__(self, policy: SchedulingPolicy):
        self._policy = policy
        self._heap: list[tuple[OrderKey, int, Ticket]] = []  # the number makes entries unique
        self._living: dict[str, int] = {}  # request id → number of its entry
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._living)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._living

    def push(self, ticket: Ticket) -> None:
        """Raises ValueError if the request waits already."""
        if ticket.request_id in self._living:
            raise ValueError(f"request {ticket.request_id} waits already")
        self._num_pushed += 1
        self._living[ticket.request_id] = self._num_pushed
        heappush(self._heap, (order_key(ticket, self._policy), self._num_pushed, ticket))

    def peek(self) -> Ticket:
        """The request that goes next. Raises IndexError if the queue is empty."""
        while self._is_dead(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Ticket:
        """Removes the request that goes next. Raises IndexError if the queue is empty."""
        ticket = self.peek()
        heappop(self._heap)
        del self._living[ticket.request_id]
        self._drop_dead()
        return ticket

    def is_before(self, ticket: Ticket, other: Ticket) -> bool:
        """Whether the first of two tickets goes first, wherever they wait."""
        return order_key(ticket, self._policy) < order_key(other, self._policy)

    def remove(self, request_id: str) -> None:
        """Removes a request. Unknown requests are ignored."""
        if self._living.pop(request_id, None) is not None:
            self._drop_dead()

    def _drop_dead(self) -> None:
        if len(self._heap) - len(self._living) > len(self._living) + MIN_DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if not self._is_dead(entry)]
            heapify(self._heap)

    def _is_dead(self, entry: tuple[OrderKey, int, Ticket]) -> bool:
        _, number, ticket = entry
        return self._living.get(ticket.request_id) != number
