"""This door's prompts that prefill has not finished, as arrays over rows: who stands before a new one is one pass over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.policy.pool import Floats


class Ahead(NamedTuple):
    """[slots] each, in tokens of this door's prompts that are not known to be computed."""

    total: Floats
    before: Floats  # that go before a new one, if their embeddings come before its turn
    text_before: Floats  # … of prompts without media
    behind: Floats  # that could be computed beside it
    running: Floats  # in the step that runs, if it can hold them
    running_before: Floats  # … of those that go before


class PendingPrompts:
    """Rows [0, len) are in use, in no order. Tokens are those to compute when the prompt was sent; the early ones of them need no
    embeddings that were on their way then."""

    def __init__(self) -> None:
        self._ids: list[str] = []  # by row
        self._rows: dict[str, int] = {}
        self._slots = np.zeros(64, np.intp)
        self._keys = np.zeros(64)  # virtual deadlines
        self._tokens = np.zeros(64)
        self._early = np.zeros(64)
        self._is_text = np.zeros(64, bool)
        self._told_at = np.zeros(64)
        self._ready_at = np.zeros(64)  # instant when the last embeddings are there

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

    def remove(self, request_id: str) -> None:
        """Unknown ones are ignored."""
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
        """Its worker is gone."""
        for request_id in [i for i in self._ids if self._slots[self._rows[i]] == slot]:
            self.remove(request_id)

    def ahead(
        self,
        key: float,
        soon: float,
        token_s: Floats,
        began_at: Floats,
        previous_at: Floats,
        turn_at: Floats | None,
    ) -> Ahead:
        """Of a prompt with that virtual deadline; equals go first. `soon`: the instant when it has its own embeddings. [slots]: how
        long a token takes; when the running step began, and the one before it: early tokens run in the first step after they
        were sent; when its turn comes, None: when those are computed that can run as soon as it can."""
        num_rows, num_slots = len(self._ids), len(token_s)
        slots, tokens = self._slots[:num_rows], self._tokens[:num_rows]
        told_at, ready_at = self._told_at[:num_rows], self._ready_at[:num_rows]
        early = self._early[:num_rows] * (told_at >= previous_at[slots])
        left = tokens - self._early[:num_rows] + early

        def by_slot(tokens: Floats) -> Floats:
            return np.bincount(slots, tokens, num_slots).astype(np.float64, copy=False)

        is_before = self._keys[:num_rows] <= key
        able = np.where(ready_at <= soon, left, early)
        if turn_at is None:
            turn_at = soon + by_slot(able * is_before) * token_s
        before = np.where(ready_at <= turn_at[slots], left, early) * is_before
        running = np.where(ready_at <= began_at[slots], left, early) * (told_at < began_at[slots])
        return Ahead(
            by_slot(left),
            by_slot(before),
            by_slot(before * self._is_text[:num_rows]),
            by_slot(able * ~is_before),
            by_slot(running),
            by_slot(running * is_before),
        )

    def _columns(self) -> dict[str, NDArray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
