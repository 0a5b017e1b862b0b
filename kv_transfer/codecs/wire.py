"""Room for KV that travels coded: a wire memory beside a KV memory, on either side of a lease.

    owner   beside the KV blocks, one wire block for each whole group of 64 tokens, granted together with them
    writer  codes a group into a wire block of its own, writes that one to the owner's, keeps it until the lease ends
    owner   when all is there: decodes into the KV blocks, then the lease is complete

Whether KV is to travel coded is the door's decision: decode grants wire blocks then. A group without one, on either side, goes raw,
and so does what is no whole group. Thread-safe but for the bytes:
`encode` and `decode` belong to the agent's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.curves import CodecSpeed
from cluster.types.transfer import CodedPart
from kv_transfer.agents.agent import TransferError
from kv_transfer.codecs.codecs import GROUP_TOKENS, Codec, CodecName

MEASURED_GROUPS, MEASURED_ROUNDS = 8, 3
LOOK_EVERY = 4096  # groups of a layer that are coded, from one look at the error to the next
SEGMENTS_PER_LAYER = 4  # of a wire memory


@dataclass
class Counts:
    """Of a writer's wire since the start."""

    coded_groups: int = 0
    crowded_groups: int = 0  # that went raw because there was no room
    key_error: float = 0.0  # of the last group and layer that were looked at: `Codec.relative_error`
    value_error: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Of a codec, in bytes of raw KV per second."""

    encode: float
    decode: float


class Wire:
    def __init__(self, kv: BlockMemory, codec: CodecName, num_tokens: int):
        """Room for `num_tokens` of KV. ValueError for a layout that cannot be coded. Measures the codec: call it before `kv` holds
        anything."""
        self.codec = Codec(kv.layout, codec)
        self.memory = BlockMemory(
            self.codec.wire_layout, max(1, num_tokens // GROUP_TOKENS), kv.buffer.device
        )
        self.ratio = self.memory.layout.block_bytes / (self.codec.blocks_per_group * kv.layout.block_bytes)
        self._kv = kv
        self._pool = BlockPool(self.memory.num_blocks, GROUP_TOKENS)
        self._lock = threading.Lock()
        self.counts = Counts()
        self._num_until_look = LOOK_EVERY
        self.speed = self._measured()
        self._num_until_look = 0

    @property
    def encoding(self) -> CodecSpeed:
        return CodecSpeed(self.ratio, 1 / self.speed.encode)

    @property
    def decoding(self) -> CodecSpeed:
        return CodecSpeed(self.ratio, 1 / self.speed.decode)

    @property
    def blocks_per_group(self) -> int:
        return self.codec.blocks_per_group

    def first_blocks(self, run_lengths: Sequence[int]) -> list[int]:
        """Runs of so many tokens lie in blocks one after the other, each from a block of its own. The numbers of the blocks with
        which whole groups begin."""
        firsts: list[int] = []
        start = 0
        for length in run_lengths:
            firsts += range(
                start, start + length // GROUP_TOKENS * self.blocks_per_group, self.blocks_per_group
            )
            start += -(-length // self.codec.block_size)
        return firsts

    def try_take(self, num_blocks: int) -> list[int] | None:
        with self._lock:
            return self._pool.try_allocate(num_blocks)

    def generations(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        with self._lock:
            return self._pool.generations(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._pool.free(block_ids)

    @property
    def num_used(self) -> int:
        with self._lock:
            return self._pool.num_referenced

    def take_one(self) -> int | None:
        """For a group that is to be sent; counted either way."""
        taken = self.try_take(1)
        if taken is None:
            self.counts.crowded_groups += 1
            return None
        self.counts.coded_groups += 1
        return taken[0]

    def encode(self, groups: Sequence[Sequence[int]], wire_ids: Sequence[int], layers: Sequence[int]) -> None:
        """Blocks of the KV memory, a group each, to blocks of the wire; done when it returns."""
        self.codec.encode_groups(self._kv, groups, self.memory, wire_ids, layers)
        self.memory.synchronize()
        self._num_until_look -= len(groups) * len(layers)
        if self._num_until_look <= 0:
            self._num_until_look = LOOK_EVERY
            errors = self.codec.relative_error(self._kv, groups[-1], self.memory, wire_ids[-1], layers[-1])
            self.counts.key_error, self.counts.value_error = errors

    def decode(self, wire_ids: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """All layers; done when it returns."""
        self.codec.decode_groups(self.memory, wire_ids, self._kv, groups)
        self._kv.synchronize()

    def _measured(self) -> Speed:
        per_group = self.blocks_per_group
        count = min(MEASURED_GROUPS, self.memory.num_blocks, self._kv.num_blocks // per_group)
        if count == 0:
            return Speed(1.0, 1.0)  # no group fits the memory: none will be coded
        groups = [range(i * per_group, (i + 1) * per_group) for i in range(count)]
        wire_ids, layers = range(count), range(self.codec.num_layers)
        num_bytes = count * per_group * self._kv.layout.block_bytes
        times = {"encode": [], "decode": []}
        for _ in range(MEASURED_ROUNDS):
            start = time.perf_counter()
            self.encode(groups, wire_ids, layers)
            between = time.perf_counter()
            self.decode(wire_ids, groups)
            times["encode"].append(between - start)
            times["decode"].append(time.perf_counter() - between)
        return Speed(*(num_bytes / min(taken) for taken in times.values()))


@dataclass(frozen=True)
class BlockWrite:
    """Block local_ids[i] of one memory goes to block remote_ids[i] of another with the same layout."""

    local_ids: Sequence[int]
    remote_ids: Sequence[int]
    segment_ids: Sequence[int] | None  # None: all


class Coding:
    """The writer's half of a lease's coded part. Whether a group has room here is decided with its first write, because it goes layer
    by layer, and if some of it went raw all must. Belongs to the agent's thread."""

    def __init__(self, wire: Wire, part: CodedPart):
        self.wire = wire
        self.part = part
        firsts = enumerate(part.first_blocks)
        self._group_of = {first + i: group for group, first in firsts for i in range(wire.blocks_per_group)}
        self._wire_ids: dict[int, int | None] = {}  # of the groups that were begun; None: raw

    def covers(self, place: int) -> bool:
        """Whether this block of the grant travels coded."""
        return place in self._group_of and self._wire_ids.get(self._group_of[place]) is not None

    @property
    def coded_groups(self) -> dict[int, int]:
        """By number, with the wire blocks that hold them here."""
        return {group: wire_id for group, wire_id in sorted(self._wire_ids.items()) if wire_id is not None}

    def encode(
        self, sources: dict[int, int], segment_ids: Sequence[int] | None
    ) -> tuple[BlockWrite, dict[int, int]]:
        """Codes what travels coded of a write (`sources`: place in the grant → local block). Returns how that goes from wire memory
        to wire memory, and the sources that are left. Raises TransferError for a group that was begun whole and goes on in parts."""
        layers = _layers(segment_ids, self.wire.codec.num_layers)
        places: dict[int, list[int]] = {}
        for place in sorted(sources):
            if place in self._group_of:
                places.setdefault(self._group_of[place], []).append(place)
        for group in places:
            is_whole = layers is not None and len(places[group]) == self.wire.blocks_per_group
            if group not in self._wire_ids:
                self._wire_ids[group] = self.wire.take_one() if is_whole else None
            elif self._wire_ids[group] is not None and not is_whole:
                raise TransferError(f"group {group} was begun whole and goes on in parts")
        wire_ids = {group: wire_id for group in places if (wire_id := self._wire_ids[group]) is not None}
        if layers is None or not wire_ids:
            return BlockWrite([], [], None), sources
        local_ids = list(wire_ids.values())
        self.wire.encode(
            [[sources[place] for place in places[group]] for group in wire_ids], local_ids, layers
        )
        coded = BlockWrite(
            local_ids,
            [self.part.block_ids[group] for group in wire_ids],
            [SEGMENTS_PER_LAYER * layer + i for layer in layers for i in range(SEGMENTS_PER_LAYER)],
        )
        return coded, {place: block for place, block in sources.items() if not self.covers(place)}

    def release(self) -> None:
        """The lease is over."""
        self.wire.free(list(self.coded_groups.values()))
        self._wire_ids.clear()


def _layers(segment_ids: Sequence[int] | None, num_layers: int) -> list[int] | None:
    """The layers whose K and V these segments are; None: of some layer it is only one of the two."""
    if segment_ids is None:
        return list(range(num_layers))
    layers = sorted({segment // 2 for segment in segment_ids})
    return layers if len(segment_ids) == 2 * len(layers) else None
