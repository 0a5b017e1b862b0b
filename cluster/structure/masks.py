"""Masks of the tokens that may come next, for the rows of a step.

    start   names the matchers and their drafts → the forward runs → `take` returns all masks

One thread fills them while the forward runs, without the GIL, by llguidance's own pool of threads. Steps
without structures do not come here. The array is used again in the next step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from cluster.structure.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

MAX_THREADS = 8
TIMEOUT_S = 30.0  # a mask takes at most some milliseconds: llguidance counts what it does

Wanted = Sequence[tuple[Matcher, Sequence[int]]]


class MaskFiller:
    """`start` and `take` on one thread, in turn."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "masks")
        self._pool: LLExecutor | None = None
        self._masks = np.zeros((0, 0), dtype=np.int32)
        self._filling: Future[np.ndarray] | None = None

    def start(self, wanted: Wanted, num_words: int) -> None:
        """For each matcher, 1 + the number of its drafts masks are filled. The drafts are legal. Does not
        wait."""
        if self._filling is not None:  # the step before has failed
            wait([self._filling], TIMEOUT_S)
        num_rows = sum(1 + len(drafts) for _, drafts in wanted)
        if self._masks.shape[1] != num_words or len(self._masks) < num_rows:
            self._masks = np.zeros((max(num_rows, 2 * len(self._masks)), num_words), dtype=np.int32)
        masks = self._masks[:num_rows]
        if all(matcher.mask is not None and not drafts for matcher, drafts in wanted):
            self._filling = Future()
            self._filling.set_result(self._fill(wanted, masks))  # copies only, as for first tokens
        else:
            self._filling = self._executor.submit(self._fill, wanted, masks)

    def take(self) -> np.ndarray:
        """[rows, num_words] int32, in the order of `start`; valid until the next `start`. Raises
        StructureError if a matcher has reached a limit."""
        if self._filling is None:
            raise AssertionError("take without start")
        filling, self._filling = self._filling, None
        return filling.result(TIMEOUT_S)

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    def _fill(self, wanted: Wanted, masks: np.ndarray) -> np.ndarray:
        row, unknown = 0, []
        for matcher, drafts in wanted:
            if matcher.mask is not None and not drafts:
                masks[row] = matcher.mask
            else:
                masks[row : row + 1 + len(drafts)] = -1  # behind a draft that completes the answer: not read
                unknown.append((matcher, row, list(drafts)))
            row += 1 + len(drafts)
        if unknown:
            self._compute(unknown, masks)
        return masks

    def _compute(self, unknown: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> None:
        pool = self._pool = self._pool or _pool()
        memory = masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        plain = [(matcher.native, row) for matcher, row, drafts in unknown if not drafts]
        drafted = [(matcher.native, row, drafts) for matcher, row, drafts in unknown if drafts]
        if plain:
            pool.unsafe_compute_mask_ptr(plain, *memory)
        if drafted:
            pool.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
        for matcher, row, drafts in unknown:
            matcher.check()
            for mask in masks[row : row + 1 + len(drafts)]:
                matcher.put_ends(mask)


def _pool() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
