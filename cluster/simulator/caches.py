"""What simulated workers keep for reuse: full blocks of prompts, and embeddings. Least recently used goes
first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

EPSILON = 1e-6  # of a block: answers grow by parts of it


@dataclass(slots=True)
class Changes:
    """What has changed since the last report. A key is in one of them, or in neither if it came and went."""

    added: dict = field(default_factory=dict)
    evicted: dict = field(default_factory=dict)

    def add(self, key: bytes | str) -> None:
        if self.evicted.pop(key, self) is self:
            self.added[key] = None

    def evict(self, key: bytes | str) -> None:
        if self.added.pop(key, self) is self:
            self.evicted[key] = None

    def take(self) -> tuple[tuple, tuple]:
        """(added, evicted) since the last call."""
        found = tuple(self.added), tuple(self.evicted)
        self.added, self.evicted = {}, {}
        return found


class BlockCache:
    """Counts a worker's KV blocks, without their content. Held are shared blocks, by hash, with the number of
    holders, and anonymous ones. Other blocks with a hash are kept until their room is needed."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_anonymous = 0.0  # answers grow by parts of a block
        self.changes = Changes()
        self._held: dict[bytes, int] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_used(self) -> float:
        return self.num_anonymous + len(self._held)

    @property
    def num_cached(self) -> int:
        return len(self._kept)

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks are here."""
        held, kept = self._held, self._kept
        for i, key in enumerate(hashes):
            if key not in held and key not in kept:
                return i
        return len(hashes)

    def try_take(self, shared: Sequence[bytes], num_new: int, num_spare: int = 0) -> bool:
        """Hold these blocks, which `match` found, and `num_new` new ones. False: fewer than `num_spare`
        would be left, and nothing has changed."""
        num_resting = sum(key not in self._held for key in shared)
        if self.num_used + num_resting + num_new + num_spare > self.num_blocks + EPSILON:
            return False
        for key in shared:
            self._kept.pop(key, None)
            self._held[key] = self._held.get(key, 0) + 1
        self.grow(num_new)
        return True

    def grow(self, num_new: float) -> None:
        """Holders have so many anonymous blocks more."""
        self.num_anonymous += num_new
        while self._kept and self.num_used + len(self._kept) > self.num_blocks:
            key, _ = self._kept.popitem(last=False)
            self.changes.evict(key)

    def name(self, key: bytes) -> bool:
        """An anonymous block has been filled. False: a block with its content is here already, so this one
        remains anonymous."""
        if key in self._held or key in self._kept:
            return False
        self.num_anonymous -= 1
        self._held[key] = 1
        self.changes.add(key)
        return True

    def free(self, keys: Sequence[bytes], num_anonymous: float) -> None:
        """The blocks of one holder. Blocks with a hash are kept until room is needed; the last block of a
        prompt is evicted first."""
        self.num_anonymous -= num_anonymous
        for key in reversed(keys):
            left = self._held[key] - 1
            if left:
                self._held[key] = left
            else:
                del self._held[key]
                self._kept[key] = None


class MediaCache:
    """Embeddings by media hash, within a budget of bytes. Items of which no other use is expected are evicted
    first, the newest of them before the others."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[str, int] = OrderedDict()
        self._expected: set[str] = set()

    def __contains__(self, media_hash: str) -> bool:
        return media_hash in self._items

    def use(self, media_hash: str, keep: bool = False) -> bool:
        """Whether the item is here. `keep`: another use is expected. An item with an expected use, now or
        before, becomes the last to be evicted."""
        if media_hash not in self._items:
            return False
        if keep:
            self._expected.add(media_hash)
        if media_hash in self._expected:
            self._items.move_to_end(media_hash)
        return True

    def make_room(self, num_bytes: int) -> list[str]:
        """Makes room for so many bytes. Returns what was evicted."""
        evicted = []
        while self._items and self._num_bytes + num_bytes > self._max_bytes:
            gone, its_bytes = self._items.popitem(last=False)
            self._num_bytes -= its_bytes
            self._expected.discard(gone)
            evicted.append(gone)
        return evicted

    def add(self, media_hash: str, num_bytes: int, keep: bool = True) -> list[str]:
        """Returns what was evicted for it; the item itself if it is too large. `keep`: another use is
        expected."""
        evicted = self.make_room(num_bytes)
        if num_bytes > self._max_bytes:
            return [*evicted, media_hash]
        self._items[media_hash] = num_bytes
        self._items.move_to_end(media_hash, last=keep)
        self._num_bytes += num_bytes
        if keep:
            self._expected.add(media_hash)
        return evicted
