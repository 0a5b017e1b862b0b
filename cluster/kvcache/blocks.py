"""Block pool: which blocks are in use, and which blocks still hold a known prefix.

A block is in exactly one of three states:

    free        its content is not valid; on the free list
    referenced  one or more requests (or leases) hold it; if it has a hash, other requests can share it
    cached      no request holds it, but its content is known by a hash; the oldest is evicted first

    free --allocate--> referenced --free (no hash)--> free
                       referenced --free (hash)-----> cached --lookup--> referenced
                                                      cached --allocate (evicted)--> referenced

Each block has a generation. It grows whenever the block's content stops being valid (freed without a hash, or
evicted). So (block id, generation) names content, not only space. Owns no bytes and no clock; the order of
`free` calls defines which block was used last. Not thread-safe: one engine owns one pool. Every call costs
O(blocks named in it), whatever the size of the pool; but for `check_integrity`, `forget_all` and `reset`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import compress

from cluster.errors import BookkeepingError, OverloadedError
from cluster.kvcache.hashing import is_announced
from cluster.types.messages import BlocksChanged


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks of tokens, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size  # token positions per block
        self._free: deque[int] = deque(range(num_blocks))
        self._num_references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # hash -> block; referenced or cached
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced blocks with a hash, oldest first
        # Hashes that were added or removed since `take_changes`, in order. None: the pool is not watched.
        self._changed: dict[bytes, None] | None = None
        self._newly_cached: list[int] | None = None  # since `take_cached`; None: they are not noted

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found by `lookup`."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    def generations(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The generation of each block, as a grant carries them."""
        return tuple(self._generations[block_id] for block_id in block_ids)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest prefix of `hashes` whose blocks are known. The caller gets one reference to each
        block."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            if self._num_references[block_id] == 0:
                del self._cached[block_id]
            self._num_references[block_id] += 1
            found.append(block_id)
        return found

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many blocks `lookup` would find. Changes nothing."""
        return next(
            (i for i, block_hash in enumerate(hashes) if block_hash not in self._block_of), len(hashes)
        )

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """How many of the blocks that `lookup` would find are held by requests already. Only these need no
        free block. Changes nothing."""
        num_held = 0
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            num_held += self._num_references[block_id] > 0
        return num_held

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks without valid content, one reference each. None, and no change, if there are
        too few."""
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_free:
            return None
        allocated: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.popleft() if self._free else self._evict()
            self._num_references[block_id] = 1
            allocated.append(block_id)
        return allocated

    def allocate(self, num_blocks: int) -> list[int]:
        """Like `try_allocate`. Raises `OverloadedError` if there are too few; the caller waits or refuses."""
        allocated = self.try_allocate(num_blocks)
        if allocated is None:
            raise OverloadedError(
                f"{num_blocks} cache blocks wanted, {self.num_free} of {self.num_blocks} free"
            )
        return allocated

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reference to each block. The blocks must be referenced already. A shared block must not be
        written."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                raise BookkeepingError(f"block {block_id} is shared but no request holds it")
            self._num_references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives one reference to each block back. `block_ids` is in prompt order; its tail is evicted first,
        because a prefix is worth more than the blocks that follow it."""
        for block_id in reversed(block_ids):
            if self._num_references[block_id] == 0:
                raise BookkeepingError(f"block {block_id} is freed but no request holds it")
            self._num_references[block_id] -= 1
            if self._num_references[block_id] > 0:
                continue
            if self._hash_of[block_id] is None:
                self._generations[block_id] += 1
                self._free.append(block_id)
            else:
                self._cached[block_id] = None
                if self._newly_cached is not None:
                    self._newly_cached.append(block_id)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full, computed block findable. The first block that was registered for a hash stays the one
        that is found. A second one with equal content stays valid for its holder and becomes free with its
        last reference."""
        if self._num_references[block_id] == 0:
            raise BookkeepingError(f"block {block_id} is registered but no request holds it")
        known = self._hash_of[block_id]
        if known is not None and known != block_hash:
            raise BookkeepingError(
                f"block {block_id} already holds other content; a full block never changes"
            )
        if self._block_of.setdefault(block_hash, block_id) == block_id:
            self._hash_of[block_id] = block_hash
            self._note(block_hash)

    def forget_all(self) -> None:
        """Drops the prefix cache: cached blocks become free, referenced ones lose their hash."""
        while self._cached:
            self._free.append(self._evict())
        for block_hash, block_id in self._block_of.items():
            self._hash_of[block_id] = None
            self._note(block_hash)
        self._block_of.clear()

    def watch(self) -> None:
        """Makes `take_changes` report what is added and evicted from now on."""
        self._changed = {}

    def content(self) -> tuple[bytes, ...]:
        """All announced hashes that `lookup` finds."""
        return tuple(name for name in self._block_of if is_announced(name))

    def take_changes(
        self, others: Iterable[bytes] = (), elsewhere: Container[bytes] = ()
    ) -> BlocksChanged | None:
        """Announced hashes that `lookup` finds since the last call, and those that it does not find any more.
        None: no change. Only for a pool that is watched. `others`: hashes that have changed in a second tier;
        `elsewhere`: what it has, which counts as found."""
        changed = {**(self._changed or {}), **dict.fromkeys(others)}
        if not changed:
            return None
        self._changed = {}
        found = {name for name in changed if name in self._block_of or name in elsewhere}
        return BlocksChanged(
            tuple(name for name in changed if name in found),
            tuple(name for name in changed if name not in found),
        )

    def note_cached(self) -> None:
        """Makes `take_cached` report blocks that lose their last reference from now on."""
        self._newly_cached = []

    def take_cached(self) -> list[tuple[int, bytes]]:
        """Blocks that have become cached since the last call, with their hashes. A block's content is this as
        long as its generation stays."""
        block_ids, self._newly_cached = self._newly_cached or (), []
        return [(block_id, name) for block_id in block_ids if (name := self._hash_of[block_id]) is not None]

    def check_integrity(self) -> None:
        """Raises BookkeepingError unless `check_tables` finds nothing wrong."""
        check_tables(self._free, self._num_references, self._hash_of, self._block_of, self._cached)

    def reset(self) -> None:
        """Makes every block free, whatever is recorded, and ends every generation. Only for a pool of which
        nothing is held."""
        for block_hash in self._block_of:
            self._note(block_hash)
        self._block_of.clear()
        self._cached.clear()
        self._free = deque(range(self.num_blocks))
        self._num_references = [0] * self.num_blocks
        self._generations = [generation + 1 for generation in self._generations]
        self._hash_of = [None] * self.num_blocks
        if self._newly_cached is not None:
            self._newly_cached = []

    def _evict(self) -> int:
        """Takes the cached block that was used longest ago. Its content is lost."""
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block_id] = None
        self._generations[block_id] += 1
        self._note(block_hash)
        return block_id

    def _note(self, block_hash: bytes) -> None:
        if self._changed is not None and is_announced(block_hash):
            self._changed[block_hash] = None


def check_tables(
    free_list: Sequence[int],
    num_references: Sequence[int],
    hash_of: Sequence[bytes | None],
    block_of: Mapping[bytes, int],
    cached_blocks: Iterable[int],
) -> None:
    """Raises BookkeepingError unless every block is in exactly one state and all tables of the pool agree.
    Costs O(number of blocks), in operations on whole tables; `cluster.engine.idle_check` says how much."""
    num_blocks = len(num_references)
    free, cached, hashed = set(free_list), set(cached_blocks), set(block_of.values())
    referenced = set(compress(range(num_blocks), num_references))
    is_known = [hash_of[block_id] for block_id in block_of.values()] == list(block_of)
    for is_right, fault in (
        (len(free) == len(free_list), "a block is on the free list twice"),
        (
            free.isdisjoint(cached) and free.isdisjoint(referenced) and referenced.isdisjoint(cached),
            "a block has two states",
        ),
        (len(free) + len(cached) + len(referenced) == num_blocks, "a block has no state"),
        (min(num_references) >= 0, "a reference count is negative"),
        (is_known and num_blocks - hash_of.count(None) == len(block_of), "hash tables disagree"),
        (cached <= hashed, "a cached block has no hash"),
        (free.isdisjoint(hashed), "a free block has a hash"),
    ):
        if not is_right:
            raise BookkeepingError(fault)
