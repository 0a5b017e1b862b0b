"""Masks of the tokens that may come next, for the rows of a step.

    may_draw   which choices the step can have
    start      names the matchers and their drafts → the forward runs → `take` returns the masks

One thread fills them while the forward runs, without the GIL, by llguidance's own pool of threads. Steps
without structures do not come here. The array is used again in the next step.

No step waits for long:
* A matcher whose mask is not there shortly after the forward is late: nothing is drawn for it in this step.
* It is slow from then on, as a matcher is that was slow on the engine's thread: another thread, of low
  priority, fills its next mask before a step has its choice again. If that is quick, it is not slow any more.
* A matcher that has reached a limit has no mask either: `may_draw` raises its error.

So a token is drawn later, and is the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import ClusterError, InternalError
from cluster.structure.compiler import Call, yield_to_others
from cluster.structure.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

logger = logging.getLogger(__name__)

MAX_THREADS = 8
GRACE_S = 0.03  # that a step waits for masks after its forward. Most take less than 1 ms

Wanted = Sequence[tuple[Matcher, Sequence[int]]]


@dataclass
class _Filling:
    masks: np.ndarray  # [rows, num_words] int32
    unknown: list[tuple[int, Matcher, int, list[int]]]  # index, matcher, its first row, drafts
    late: set[int]  # indices of matchers that have no mask
    future: Future[None] | None  # None: all masks are here


class MaskFiller:
    """`start` and `take` on the engine's thread, in turn."""

    def __init__(self, executor: Executor | None = None, aside: Executor | None = None):
        """Their threads fill masks while the forward runs, and those of slow matchers."""
        self._executor = executor or ThreadPoolExecutor(1, "masks")
        self._aside = aside or ThreadPoolExecutor(1, "slow-masks", yield_to_others)
        self._call: Call = lambda function, *args: function(*args)
        self._pool: LLExecutor | None = None
        self._masks = np.zeros((0, 0), dtype=np.int32)
        self._step: _Filling | None = None

    def attach(self, call: Call) -> None:
        """`call(function, *args)` runs it on the engine's thread."""
        self._call = call

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)

    def may_draw(self, matcher: Matcher) -> bool:
        """Whether the next step can draw for it. If not, the engine's thread is called when that changes.
        Raises the matcher's error."""
        if matcher.is_busy:
            return False
        if matcher.error is not None:
            raise matcher.error
        if matcher.is_slow and matcher.mask is None:
            matcher.is_busy = True
            self._aside.submit(self._fill_aside, matcher)
            return False
        return True

    def start(self, wanted: Wanted, num_words: int) -> None:
        """Starts to fill 1 + the number of its drafts masks for each matcher. The drafts are legal. Does not
        wait."""
        if self._step is not None:  # the step before has failed
            self._leave(self._step)
        num_rows = sum(1 + len(drafts) for _, drafts in wanted)
        if self._masks.shape[1] != num_words or len(self._masks) < num_rows:
            self._masks = np.zeros((max(num_rows, 2 * len(self._masks)), num_words), dtype=np.int32)
        self._step = step = _Filling(self._masks[:num_rows], [], set(), None)
        row = 0
        for idx, (matcher, drafts) in enumerate(wanted):
            if matcher.is_busy or matcher.error is not None:
                step.late.add(idx)
            elif matcher.mask is not None and not drafts:
                step.masks[row] = matcher.mask
            else:
                step.unknown.append((idx, matcher, row, list(drafts)))
            row += 1 + len(drafts)
        if step.unknown:
            step.future = self._executor.submit(self._fill, step)

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        """[rows, num_words] int32, in the order of `start`; valid until the next `start`. And the indices of
        the matchers that have no mask: what is in their rows means nothing."""
        if self._step is None:
            raise AssertionError("take without start")
        step, self._step = self._step, None
        if step.future is not None:
            wait([step.future], GRACE_S)
            if step.future.done():
                step.future.result()
                step.late |= {idx for idx, matcher, _, _ in step.unknown if matcher.error is not None}
            else:
                self._leave(step)
        return step.masks, frozenset(step.late)

    def _leave(self, step: _Filling) -> None:
        """No step waits for these masks any more."""
        if step.future is None:
            return
        self._masks = np.zeros((0, 0), dtype=np.int32)  # the other array is still written to
        for idx, matcher, _, _ in step.unknown:
            step.late.add(idx)
            matcher.is_busy = matcher.is_slow = True
        step.future.add_done_callback(lambda _: self._call(self._on_late, step))

    def _on_late(self, step: _Filling) -> None:
        failure = None if step.future is None or step.future.cancelled() else step.future.exception()
        for _, matcher, row, _ in step.unknown:
            matcher.is_busy = False
            if failure is not None:
                matcher.error = _named(failure)
            elif matcher.error is None:
                matcher.mask = step.masks[row].copy()

    def _fill_aside(self, matcher: Matcher) -> None:
        try:
            matcher.make_mask()
        except Exception as error:  # the thread's edge; the request must hear of it
            matcher.error = _named(error)
        self._call(self._on_filled, matcher)

    def _on_filled(self, matcher: Matcher) -> None:
        matcher.is_busy = False

    def _fill(self, step: _Filling) -> None:
        masks, pool = step.masks, self._pool or _pool()
        self._pool = pool
        memory = masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        for _, _, row, drafts in step.unknown:
            masks[row : row + 1 + len(drafts)] = -1  # after a draft that completes the answer: not read
        plain = [(matcher.native, row) for _, matcher, row, drafts in step.unknown if not drafts]
        drafted = [(matcher.native, row, drafts) for _, matcher, row, drafts in step.unknown if drafts]
        if plain:
            pool.unsafe_compute_mask_ptr(plain, *memory)
        if drafted:
            pool.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
        for _, matcher, row, drafts in step.unknown:
            try:
                matcher.check()
            except ClusterError as error:
                matcher.error = error
            for mask in masks[row : row + 1 + len(drafts)]:
                matcher.put_ends(mask)


def _named(error: BaseException) -> ClusterError:
    if isinstance(error, ClusterError):
        return error
    logger.error("a mask could not be filled", exc_info=error)
    return InternalError("a mask could not be filled; see the worker's log")


def _pool() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
