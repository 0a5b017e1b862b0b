"""What an exception on an engine's thread costs: the request that was being handled, and nothing else.

An engine does each piece of work for one request in a block `with blame.of(request_id):`, and hands each step
of a batch to `Blame.together`. If the work raises:
* the log has the traceback;
* the request fails by name, and what it held is freed;
* the engine goes on.

The engine ends, so that its worker is replaced, if going on would harm other requests:
* its device is lost, or the memory of the process is used up;
* what a request held could not be freed, or the books of a pool are wrong: `BookkeepingError`
  (`bookkeeping`).

While nothing is raised, the cost is less than a microsecond.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from cluster.errors import BookkeepingError, ClusterError, InternalError, RequestError
from cluster.isolation import Isolated
from cluster.lost_device import is_device_lost

logger = logging.getLogger(__name__)

UNEXPECTED = "the request could not be handled; see the worker's log"  # all that the door is told

P = ParamSpec("P")
T = TypeVar("T")
Part = TypeVar("Part")


class Blame:
    """Used on one engine's thread."""

    def __init__(self, fail: Callable[[str, ClusterError], None]):
        """`fail(name, error)`: the request of this name has failed. It tells the door and frees what the
        request holds; it ignores unknown names. An exception that it raises ends the engine."""
        self._fail = fail

    def of(self, name: str) -> Isolated:
        """The block acts for this request, whose code may raise anything: an exception fails it."""
        return Isolated(self.take, name)

    def take(self, name: str, error: Exception) -> None:
        """The request has failed with this error. Raises it again if it ends the engine."""
        self._fail(name, named(name, error))

    def together(
        self,
        parts: Sequence[Part],
        run: Callable[[Sequence[Part]], Sequence[T]],
        name_of: Callable[[Part], str],
        probe: Callable[[], None],
    ) -> list[tuple[Part, T]]:
        """`run(parts)`, one result for each part. If it raises, each part is run alone: parts that raise
        again have failed, the others are returned. `run` must be repeatable until it has returned. `probe` is
        a step that belongs to no request: if no part succeeds and `probe` raises, too, the device is broken,
        and the engine ends."""
        try:
            return list(zip(parts, run(parts), strict=True))
        except Exception as error:
            if ends_engine(error):
                raise
            if not isinstance(error, RequestError):  # what a client can cause fills no log
                logger.warning("a step of %d failed; each is tried alone", len(parts), exc_info=error)
        done: list[tuple[Part, T]] = []
        failed: list[tuple[Part, Exception]] = []
        for part in parts:
            try:
                (result,) = run([part])
                done.append((part, result))
            except Exception as error:
                failed.append((part, error))
                if ends_engine(error):
                    raise
        if not done:
            probe()
        for part, error in failed:
            self.take(name_of(part), error)
        return done


def named(name: str, error: Exception) -> ClusterError:
    """What the door is told; details are in the log. Raises the error again if it ends the engine."""
    if ends_engine(error):
        raise error
    if isinstance(error, ClusterError):
        return error
    logger.error("request %s failed", name, exc_info=error)
    return InternalError(UNEXPECTED)


def ends_engine(error: Exception) -> bool:
    return isinstance(error, BookkeepingError | MemoryError) or is_device_lost(error)


def bookkeeping(function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that allocates or frees. If it raises, something may be held for ever."""

    @functools.wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BookkeepingError:
            raise
        except Exception as error:
            raise BookkeepingError(f"the books are wrong after {function.__qualname__}: {error!r}") from error

    return kept
