"""Which tokens a sequence has seen, and how often each was generated: what penalties read. One object per
choice; a new token costs O(1), a step costs the distinct tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class TokenCounts:
    """Distinct tokens in the order of their first occurrence. The arrays grow by doubling."""

    def __init__(self, seen: Sequence[int], generated: Sequence[int]):
        """`seen`: tokens that count as seen and not as generated (the prompt's)."""
        distinct = list(dict.fromkeys(seen))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        for token_id in generated:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """The token has been generated."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            size = max(64, 2 * slot)
            self._ids, self._counts = np.resize(self._ids, size), np.resize(self._counts, size)
            self._counts[slot:] = 0
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def rows(self, drafts: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids, [n] int64, and how often each was generated, [n] float32: of the sequence, then with
        each draft behind it. Valid until the next token is added."""
        num_seen = len(self._slots)
        ids, counts = self._ids[:num_seen], self._counts[:num_seen]
        yield ids, counts
        for draft in drafts:
            found = np.flatnonzero(ids == draft)
            if len(found):
                counts = counts.copy()
                counts[found] += 1
            else:
                ids, counts = np.append(ids, draft), np.append(counts, np.float32(1))
            yield ids, counts
