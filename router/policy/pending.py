"""This door's prompts that prefill has not finished, as arrays over rows. One pass over them tells what is
ahead of a new prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.policy.pool import Floats, WorkerPool


class RunningTokens(NamedTuple):
    """[slots] each: tokens of this door's prompts that are not known to be computed."""

    total: Floats
    running: Floats  # in the running step, if it can hold them
    running_before: Floats  # those of prompts with an earlier deadline than the new one
    num_prompts: Floats


class Ahead(NamedTuple):
    """[slots] each: likewise, when the turn of a new prompt comes."""

    before: Floats  # of prompts with an earlier deadline whose embeddings have arrived by then
    text_before: Floats  # those of prompts without media
    behind: Floats  # of prompts with a later deadline that could share its steps
    num_prompts: Floats  # each by the part of it that is left; of text, outside the running step


class PendingPrompts:
    """Rows [0, len) are in use, in no order. A prompt's tokens are those that were to be computed when it was
    sent. Its early tokens are before the first item whose embeddings had not arrived then."""

    def __init__(self) -> None:
        self._ids: list[str] = []  # by row
        self._rows: dict[str, int] = {}
        self._slots = np.zeros(64, np.intp)
        self._keys = np.zeros(64)  # virtual deadlines
        self._tokens = np.zeros(64)
        self._early = np.zeros(64)
        self._is_text = np.zeros(64, bool)
        self._told_at = np.zeros(64)
        self._ready_at = np.zeros(64)  # predicted instant at which the last embeddings arrive
        self._num_coming = np.zeros(64)  # items whose embeddings have not arrived
        self._first_blocks = np.zeros(64, np.int64)  # key of the first block to compute; 0: none

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self,
        request_id: str,
        slot: int,
        key: float,
        num_tokens: float,
        num_early: float,
        is_text: bool,
        told_at: float,
        ready_at: float,
        num_coming: int,
        first_block: bytes | None,
    ) -> None:
        row = len(self._ids)
        if row == len(self._slots):
            for name, column in self._columns().items():
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._ids.append(request_id)
        self._rows[request_id] = row
        self._slots[row], self._keys[row] = slot, key
        self._tokens[row], self._early[row] = num_tokens, num_early
        self._is_text[row], self._told_at[row], self._ready_at[row] = is_text, told_at, ready_at
        self._num_coming[row], self._first_blocks[row] = num_coming, block_key(first_block)

    def item_done(self, request_id: str, came_at: float | None) -> None:
        """The encoder is done with one of the request's items. `came_at`: when its embeddings arrived; None:
        another request brings them. Unknown requests are ignored."""
        row = self._rows.get(request_id)
        if row is not None:
            self._num_coming[row] -= 1
            if self._num_coming[row] <= 0 and came_at is not None:
                self._ready_at[row] = came_at

    def remove(self, request_id: str) -> None:
        """Unknown requests are ignored."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        last = len(self._ids) - 1
        last_id = self._ids.pop()
        if row != last:
            for column in self._columns().values():
                column[row] = column[last]
            self._ids[row] = last_id
            self._rows[last_id] = row

    def drop_slot(self, slot: int) -> None:
        """The worker is gone."""
        for request_id in [i for i in self._ids if self._slots[self._rows[i]] == slot]:
            self.remove(request_id)

    def computing(self, pool: WorkerPool, first_blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[slots]: whether the running step computes a prompt whose first block to compute is
        `first_blocks[slot]`."""
        slots, own = self._slots[: len(self)], self._first_blocks[: len(self)]
        began_at = pool.began_at[slots]
        has_begun = self._told_at[: len(self)] < began_at
        has_begun &= self._is_ready(began_at, began_at) | (self._early[: len(self)] > 0)
        found = np.zeros(len(pool), bool)
        found[slots[has_begun & (own != 0) & (own == first_blocks[slots])]] = True
        return found

    def running(self, pool: WorkerPool, now: float, keys: Floats) -> RunningTokens:
        """`keys`: [slots], virtual deadlines of a new prompt. Pending prompts with an equal deadline are
        ahead of it."""
        slots = self._slots[: len(self)]
        running = self._running(pool, now)
        is_before = self._keys[: len(self)] <= keys[slots]
        return RunningTokens(
            self._by_slot(self._left(pool, np.inf, now), pool),
            self._by_slot(running, pool),
            self._by_slot(running * is_before, pool),
            self._by_slot(np.ones(len(self)), pool),
        )

    def ahead(
        self,
        pool: WorkerPool,
        now: float,
        keys: Floats,
        soon: Floats,
        token_s: Floats,
        not_before: Floats,
        in_step: Floats,
    ) -> Ahead:
        """Returns what is ahead of a new prompt with virtual deadlines `keys`. All arguments are [slots];
        `soon`: when its own embeddings have arrived; `token_s`: seconds per token; `in_step`: of the tokens
        that `running` gives, the part that the running step has room for. The prompt's turn comes when those
        ahead of it that can run by `soon` are computed, and not before `not_before`."""
        slots, is_text = self._slots[: len(self)], self._is_text[: len(self)]
        is_before = self._keys[: len(self)] <= keys[slots]
        able = self._left(pool, soon[slots], now)
        turn_at = np.maximum(not_before, soon + self._by_slot(able * is_before, pool) * token_s)
        at_turn = self._left(pool, turn_at[slots], now)
        # A prompt of text ends with its step. One with media may go on; which part of it runs is not known.
        ending = in_step[slots] * is_text * self._running(pool, now)
        left = np.maximum(0.0, at_turn - ending) / np.maximum(1.0, self._tokens[: len(self)])
        return Ahead(
            self._by_slot(at_turn * is_before, pool),
            self._by_slot(at_turn * is_before * is_text, pool),
            self._by_slot(at_turn * ~is_before, pool),
            self._by_slot(left, pool),
        )

    def _running(self, pool: WorkerPool, now: float) -> Floats:
        """[rows]: tokens that the running step computes, if it can hold them."""
        began_at = pool.began_at[self._slots[: len(self)]]
        return self._left(pool, began_at, now) * (self._told_at[: len(self)] < began_at)

    def _left(self, pool: WorkerPool, at: Floats | float, now: float) -> Floats:
        """[rows]: tokens that are not known to be computed and can run at that instant. Early tokens run in
        the first step after the prompt was sent."""
        early, tokens = self._early[: len(self)], self._tokens[: len(self)]
        unknown = early * (self._told_at[: len(self)] >= pool.previous_at[self._slots[: len(self)]])
        return np.where(self._is_ready(at, now), tokens - early + unknown, unknown)

    def _by_slot(self, tokens: Floats, pool: WorkerPool) -> Floats:
        return np.bincount(self._slots[: len(self)], tokens, len(pool)).astype(np.float64, copy=False)

    def _is_ready(self, at: Floats | float, now: float | Floats) -> NDArray[np.bool_]:
        """[rows]: whether all embeddings have arrived by that instant. If they have not arrived now, they do
        not count for any earlier instant, whatever was predicted."""
        return (self._ready_at[: len(self)] <= at) & ((self._num_coming[: len(self)] <= 0) | (at > now))

    def _columns(self) -> dict[str, NDArray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def block_key(block_hash: bytes | None) -> int:
    """A block's key within this process; zero for no block."""
    return 0 if block_hash is None else hash(block_hash)
