"""Who runs in a decode step, and who gives its memory back when there is none left.

A request may hold several sequences (several answers, or a guided and an unguided one): they run in the same step or not
at all.

Preemption is by recomputation: the victim frees its blocks, waits again under its first arrival and computes prompt and
answer so far anew. Victims are chosen by one total order that no preemption changes, (class, first arrival, request id),
from its end. So the request at its head, the oldest of the best class, is never chosen while anyone else runs: it keeps
its blocks and gains a token whenever its turn comes. If each request alone fits into memory, the head always
finishes; then the next one is the head. Nobody is preempted for ever unless requests of better classes never cease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar


class RunningRequest(Protocol):
    """What scheduling reads of a running request."""

    @property
    def request_id(self) -> str: ...

    @property
    def priority(self) -> int:
        """Class; lower is better."""
        ...

    @property
    def arrived_at(self) -> float:
        """First arrival, in seconds; a preemption does not change it."""
        ...

    @property
    def num_sequences(self) -> int: ...


R = TypeVar("R", bound=RunningRequest)


def select_batch(running: deque[R], max_batch_requests: int) -> list[R]:
    """The next batch, at most `max_batch_requests` sequences, in turn: when more run, those chosen go to the back.

    A request with more sequences than that runs alone. Nobody is passed over: a request of n sequences leaves at most
    n - 1 places empty in the step before its own.
    """
    batch: list[R] = []
    num_sequences = 0
    for request in running:
        num_sequences += request.num_sequences
        if batch and num_sequences > max_batch_requests:
            break
        batch.append(request)
    if len(batch) < len(running):
        running.rotate(-len(batch))
    return batch


def choose_victim(running: Iterable[R]) -> R:
    """Who gives way: the lowest class, in it the newest. It may be the one that asks for memory, which then waits.

    Raises ValueError if nobody runs.
    """
    return max(running, key=lambda request: (request.priority, request.arrived_at, request.request_id))
