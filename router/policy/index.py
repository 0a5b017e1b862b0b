"""An index of which worker holds what: blocks of prompts at prefill workers, media items at encoders.

A key's holders are the bits of one integer, one bit per slot of the pool. So one walk along a prompt gives
the matching depths of all workers, however many there are. A key that a worker has reported is known. A key
that this door has sent to a worker is expected there as long as its request lives, and counts as much.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_KEYS = 1 << 20  # known to one index: some 300 MB of them

K = TypeVar("K", bytes, str)


class HolderIndex(Generic[K]):
    """Bounded: the oldest known key is forgotten first. A forgotten holder costs time, nothing else."""

    def __init__(self) -> None:
        # Key → bits of slots. In a plain dict the first key is slow to find after many deletions.
        self._known: OrderedDict[K, int] = OrderedDict()
        self._expected: dict[K, int] = {}
        self._expectations: Counter[tuple[int, K]] = Counter()
        self._of_slot: dict[int, set[K]] = {}  # slot → known keys

    def __len__(self) -> int:
        return len(self._known)

    def holders(self, key: K) -> int:
        """Bits of the slots that have the key, or are about to have it."""
        return self._holders(key, -1)

    def add(self, slot: int, keys: Iterable[K]) -> None:
        """The worker has the keys."""
        known, own = self._known, self._of_slot.setdefault(slot, set())
        for key in keys:
            known[key] = known.get(key, 0) | 1 << slot
            own.add(key)
        while len(known) > MAX_KEYS:
            key, mask = known.popitem(last=False)
            for holder in slots_of(mask):
                self._of_slot[int(holder)].discard(key)

    def discard(self, slot: int, keys: Iterable[K]) -> None:
        """The worker no longer has the keys."""
        own = self._of_slot.get(slot, set())
        for key in keys:
            if key in own:
                own.remove(key)
                self._clear(self._known, key, slot)

    def expect(self, slot: int, keys: Iterable[K]) -> None:
        """The worker is about to have the keys. May be repeated; each call is undone by one `unexpect`."""
        for key in keys:
            self._expectations[slot, key] += 1
            self._expected[key] = self._expected.get(key, 0) | 1 << slot

    def unexpect(self, slot: int, keys: Iterable[K]) -> None:
        """Unknown keys are ignored."""
        for key in keys:
            left = self._expectations.get((slot, key), 0) - 1
            if left > 0:
                self._expectations[slot, key] = left
            elif left == 0:
                del self._expectations[slot, key]
                self._clear(self._expected, key, slot)

    def drop(self, slot: int) -> None:
        """The worker is gone; another one may take its slot."""
        for key in self._of_slot.pop(slot, ()):
            self._clear(self._known, key, slot)
        for expectation in [e for e in self._expectations if e[0] == slot]:
            del self._expectations[expectation]
            self._clear(self._expected, expectation[1], slot)

    def depth(self, keys: Sequence[K], slot: int, ends: Sequence[K] = ()) -> int:
        """How many of the first keys, without a gap, the slot is known to have. With `ends`, one per key:
        up to the last one whose end it has, too."""
        found = 0
        for depth, key in enumerate(keys):
            if not self._known.get(key, 0) >> slot & 1:
                break
            if not ends or self._known.get(ends[depth], 0) >> slot & 1:
                found = depth + 1
        return found

    def depths(
        self, keys: Sequence[K], num_slots: int, trusted: int = 0, ends: Sequence[K] = ()
    ) -> NDArray[np.float64]:
        """[num_slots]: `depth` of each slot. At slots with their bit in `trusted`, expected keys count,
        too."""
        depths = np.zeros(num_slots)
        mask = self._holders(keys[0], trusted) if keys else 0
        depth = 1
        while mask:
            left = mask & self._holders(keys[depth], trusted) if depth < len(keys) else 0
            reached = mask & self._holders(ends[depth - 1], trusted) if ends else mask & ~left
            if reached:
                depths[slots_of(reached)] = depth
            mask, depth = left, depth + 1
        return depths

    def expecting(self, key: K, num_slots: int) -> NDArray[np.float64]:
        """[num_slots]: 1 where a worker is expected to have the key soon, else 0."""
        flags = np.zeros(num_slots)
        flags[slots_of(self._expected.get(key, 0))] = 1.0
        return flags

    def _holders(self, key: K, trusted: int) -> int:
        return self._known.get(key, 0) | self._expected.get(key, 0) & trusted

    @staticmethod
    def _clear(masks: dict[K, int], key: K, slot: int) -> None:
        mask = masks.get(key, 0) & ~(1 << slot)
        if mask:
            masks[key] = mask
        else:
            masks.pop(key, None)


def slots_of(mask: int) -> NDArray[np.intp]:
    """The bits that are set, smallest first."""
    octets = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))
