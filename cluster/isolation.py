"""An exception that ends a part of the work, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Isolated:
    """`with Isolated(take, *given):` hands an exception of its block to `take(*given, error)`; what follows
    the block runs. An exception of `take` goes on, and so does what is no `Exception`, as the cancellation of
    a task."""

    __slots__ = ("_given", "_take")

    def __init__(self, take: Callable[..., None], *given: object):
        self._take, self._given = take, given

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._take(*self._given, error)
        return True
