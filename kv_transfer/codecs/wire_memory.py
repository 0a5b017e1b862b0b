"""A wire memory next to a KV memory, on either side of a lease: room for KV that travels coded.

    owner   grants a wire block for each whole group of 64 tokens, together with the KV blocks
    writer  codes a group into a wire block of its own, writes that block to the owner's and keeps it until
            the lease ends
    owner   decodes into the KV blocks when everything has arrived; then the lease is complete

The door decides whether KV travels coded; if it does, decode grants wire blocks. These travel raw: a group
without a wire block on either side, and tokens that make no whole group.

Blocks are allocated and freed on any thread. `encode`, `decode` and `begin` belong to the agent's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.curves import CodecSpeed
from kv_transfer.codecs.codec import Codec, CodingJob
from kv_transfer.codecs.pending import Batch, Pending, when_computed
from kv_transfer.codecs.quantisation import GROUP_TOKENS, CodecName

# A prompt of 2,048 tokens: what a call costs on the host of a GPU counts as it does for such a prompt.
MEASURED_GROUPS, MEASURED_ROUNDS = 32, 3
# Coded groups of a layer between two measurements of the error, each of which is a millisecond of launches on
# a GPU.
LOOK_EVERY = 1 << 15


@dataclass
class CodingCounts:
    """What a writer's wire has coded since the start. The fields are those of `SentTotals`."""

    coded_groups: int = 0
    crowded_groups: int = 0  # that went raw because there was no room
    key_error: float = 0.0  # `Codec.relative_error` of the group and layer that were measured last
    value_error: float = 0.0


class Wire:
    def __init__(self, kv: BlockMemory, codec: CodecName, num_tokens: int):
        """Room for `num_tokens` of KV. Raises ValueError for a layout that cannot be coded.

        Measures the codec, which overwrites KV blocks: call it before `kv` holds anything.
        """
        self.codec = Codec(kv.layout, codec)
        num_blocks = max(1, num_tokens // GROUP_TOKENS)
        self.memory = kv.beside(self.codec.wire_layout, num_blocks)
        self.ratio = self.memory.layout.block_bytes / (self.codec.blocks_per_group * kv.layout.block_bytes)
        self._kv = kv
        self._pool = BlockPool(num_blocks, GROUP_TOKENS)
        self._lock = threading.Lock()
        self._encodings = Batch(self._kv, self._encode)
        self._decodings = Batch(self._kv, self._decode)
        self.counts = CodingCounts()
        self._num_until_look = LOOK_EVERY
        self.encoding, self.decoding = self._measured()
        self._num_until_look = 0

    @property
    def blocks_per_group(self) -> int:
        return self.codec.blocks_per_group

    @property
    def num_used(self) -> int:
        with self._lock:
            return self._pool.num_referenced

    def first_blocks(
        self, run_lengths: Sequence[int], skipped: Sequence[int] = (), num_behind: int = 0
    ) -> list[int]:
        """Place of the first block of every whole group. Runs of so many tokens follow each other; each
        begins with a new block, and `num_behind` blocks of something else are behind it. skipped: of each
        run, how many blocks at its start have no place. Groups are counted from the run's start all the same;
        one that lacks a block is not whole."""
        firsts: list[int] = []
        start, size = 0, self.blocks_per_group
        for length, missing in zip(run_lengths, skipped or [0] * len(run_lengths), strict=True):
            first_group = -(-missing // size) * size
            firsts += range(
                start + first_group - missing, start + length // GROUP_TOKENS * size - missing, size
            )
            start += self.num_blocks(length) - missing + num_behind
        return firsts

    def num_blocks(self, run_length: int) -> int:
        """Counts the KV blocks of a run of so many tokens."""
        return -(-run_length // self.codec.block_size)

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        with self._lock:
            return self._pool.try_allocate(num_blocks)

    def try_allocate_to_send(self) -> int | None:
        """A block for one group that is to be sent. Counts the group as coded or, for None, as crowded."""
        block_ids = self.try_allocate(1)
        if block_ids is None:
            self.counts.crowded_groups += 1
            return None
        self.counts.coded_groups += 1
        return block_ids[0]

    def generations(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        with self._lock:
            return self._pool.generations(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._pool.free(block_ids)

    def encode(
        self, groups: Sequence[Sequence[int]], wire_ids: Sequence[int], layers: Sequence[int]
    ) -> Pending[None]:
        """KV blocks of each group to its wire block. Both must not change or be freed before it is done."""
        return self._encodings.add(self.codec.job(self._kv, groups, self.memory, wire_ids, layers))

    def decode(self, wire_ids: Sequence[int], groups: Sequence[Sequence[int]]) -> Pending[None]:
        """All layers of these groups, likewise."""
        return self._decodings.add(self.codec.job(self._kv, groups, self.memory, wire_ids))

    def begin(self) -> None:
        """Begins what was asked for since the last call: encodings as one launch, decodings as another."""
        self._encodings.begin()
        self._decodings.begin()

    def _encode(self, jobs: list[CodingJob]) -> Pending[Sequence[None]]:
        self.codec.code(self._kv, self.memory, jobs, encodes=True)
        self._num_until_look -= sum(len(job.wire_blocks) * len(job.layers) for job in jobs)
        last = jobs[-1]
        if self._num_until_look > 0:
            return when_computed(self.memory, lambda: [None] * len(jobs))
        self._num_until_look = LOOK_EVERY
        errors = self.codec.relative_error(
            self._kv, last.blocks[-1], self.memory, last.wire_blocks[-1], last.layers[-1]
        )

        def value() -> Sequence[None]:
            self.counts.key_error, self.counts.value_error = errors.value()
            return [None] * len(jobs)

        return Pending(errors.is_done, value)

    def _decode(self, jobs: list[CodingJob]) -> Pending[Sequence[None]]:
        self.codec.code(self._kv, self.memory, jobs, encodes=False)
        return when_computed(self._kv, lambda: [None] * len(jobs))

    def _measured(self) -> tuple[CodecSpeed, CodecSpeed]:
        """The speeds of encoding and of decoding: the fastest of a few rounds."""
        per_group = self.blocks_per_group
        count = min(MEASURED_GROUPS, self.memory.num_blocks, self._kv.num_blocks // per_group)
        if count == 0:  # no group fits the memory: none will be coded
            return CodecSpeed(self.ratio, 1.0), CodecSpeed(self.ratio, 1.0)
        groups = [range(i * per_group, (i + 1) * per_group) for i in range(count)]
        wire_ids, layers = range(count), range(self.codec.num_layers)
        encode_s: list[float] = []
        decode_s: list[float] = []
        for _ in range(MEASURED_ROUNDS):
            start = time.perf_counter()
            encoding = self.encode(groups, wire_ids, layers)
            self.begin()
            self.memory.synchronize()
            between = time.perf_counter()
            decoding = self.decode(wire_ids, groups)
            self.begin()
            self._kv.synchronize()
            for each in (encoding, decoding):
                each.value()  # raises what would end every lease
            encode_s.append(between - start)
            decode_s.append(time.perf_counter() - between)
        num_bytes = count * per_group * self._kv.layout.block_bytes
        return CodecSpeed(self.ratio, min(encode_s) / num_bytes), CodecSpeed(
            self.ratio, min(decode_s) / num_bytes
        )
