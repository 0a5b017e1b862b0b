"""Which requests run in a decode step, and which one is preempted when no memory is left.

A request may have several sequences (several answers, or a guided and an unguided one). They run in the same
step or not at all.

Preemption is by recomputation: the victim frees its blocks, waits again with its first arrival, and its
prompt and answer so far are computed again. Victims are chosen from the end of one total order that no
preemption changes: (class, first arrival, request id). So the request at its head, the oldest of the best
class, is not preempted while another request runs: it keeps its blocks and gains a token whenever it is in
the batch. If each request alone fits into memory, the head always finishes; then the next request is the
head. No request is preempted for ever, unless requests of better classes never cease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
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
        """First arrival, in seconds. A preemption does not change it."""
        ...

    @property
    def num_sequences(self) -> int: ...


R = TypeVar("R", bound=RunningRequest)


def select_batch(running: deque[R], max_batch_requests: int, waiting: Collection[str] = ()) -> list[R]:
    """The next batch: at most `max_batch_requests` sequences, in rotation. If more requests run, the chosen
    ones go to the back. `waiting`: ids of requests that no step can continue now; they keep their turn.

    A request with more sequences than that runs alone. No other request is skipped: a request of n sequences
    leaves at most n - 1 places empty in the step before its own."""
    batch: list[R] = []
    num_sequences = 0
    able = [request for request in running if request.request_id not in waiting] if waiting else running
    for request in able:
        num_sequences += request.num_sequences
        if batch and num_sequences > max_batch_requests:
            break
        batch.append(request)
    if len(batch) == len(able):
        return batch
    if waiting:
        chosen = {request.request_id for request in batch}
        rest = [request for request in running if request.request_id not in chosen]
        running.clear()
        running.extend([*rest, *batch])
    else:
        running.rotate(-len(batch))
    return batch


def choose_victim(running: Iterable[R]) -> R:
    """The request to preempt: the newest of the lowest class. It may be the request that needs memory, which
    then waits.

    Raises ValueError if no request runs."""
    return max(running, key=lambda request: (request.priority, request.arrived_at, request.request_id))
