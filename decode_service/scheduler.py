"""Who runs in a decode step. Pure: plain values in, plain values out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def select_batch(running: deque[T], max_batch_requests: int) -> list[T]:
    """The next batch, at most `max_batch_requests`, in turn: when there are more, those that ran go to the back."""
    if len(running) <= max_batch_requests:
        return list(running)
    batch = [running[i] for i in range(max_batch_requests)]
    running.rotate(-max_batch_requests)
    return batch


def admit(waiting: deque[T], num_free_blocks: int, num_blocks: Callable[[T], int]) -> list[T]:
    """The longest run of waiting requests, in order of arrival, whose blocks fit: nobody overtakes a large request."""
    admitted: list[T] = []
    for request in waiting:
        num_free_blocks -= num_blocks(request)
        if num_free_blocks < 0:
            break
        admitted.append(request)
    return admitted
