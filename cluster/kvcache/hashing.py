"""Block hashes: the name of a full block's content, given everything before it.

    hash[-1] = H(the prompt's cache salt, block size, digest of its adapter if it has one)
    hash[i]  = H(hash[i-1], token ids of block i, contents of its placeholders)

Placeholder tokens are equal for all images of a model. So each run of an item's rows in a block adds
(modality, media hash, first row, position in the block, number of rows): blocks of two images never share a
name, and blocks that start at different rows of one image do not either. Text after an image differs too,
through the chain. Names are equal in all processes of one cluster (little- and big-endian hosts must not be
mixed) and are used as cache keys only. A hybrid model's state after a block lies in blocks whose names are
the block's with a number behind it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b

from cluster.types.media import PlacedMedia
from cluster.types.request import Prompt

_DIGEST_BYTES = 32  # a client chooses prompts freely, so it must not be able to find collisions


class BlockHashes:
    """The hashes of one sequence's full blocks: of its prompt, then also of its answer.

    hashes: one per full block, as `block_hashes` gives them for a prompt that contains all tokens so far,
    with the same media, salt and adapter. A hash says nothing about the block's KV: of the newest tokens it
    may not be computed yet. Not thread-safe.
    """

    def __init__(self, prompt: Prompt, block_size: int):
        """Ranges of `prompt.media` do not overlap."""
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._extras = _media_parts(prompt.media, block_size, len(prompt.token_ids))
        self._tail = array("q")  # token ids after the last full block
        start = prompt.cache_salt.encode() + struct.pack("<q", block_size) + prompt.adapter.encode()
        self._parent = blake2b(start, digest_size=_DIGEST_BYTES).digest()
        self.extend(prompt.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Generated tokens, which are text whatever their ids are."""
        self._tail.extend(token_ids)
        num_blocks = len(self._tail) // self.block_size
        if num_blocks == 0:
            return
        stride = self.block_size * 8  # bytes of one block's token ids
        token_bytes = memoryview(self._tail.tobytes())
        for i in range(num_blocks):
            state = blake2b(self._parent, digest_size=_DIGEST_BYTES)
            state.update(token_bytes[i * stride : (i + 1) * stride])
            extra = self._extras.get(len(self.hashes))
            if extra is not None:
                state.update(extra)
            self._parent = state.digest()
            self.hashes.append(self._parent)
        del self._tail[: num_blocks * self.block_size]

    def fork(self) -> BlockHashes:
        """The hashes of a sequence that has the same tokens so far and continues on its own: another
        choice."""
        other = copy(self)
        other.hashes, other._tail = self.hashes[:], self._tail[:]
        return other


def block_hashes(prompt: Prompt, block_size: int) -> list[bytes]:
    """One hash per full block of the prompt: `len(token_ids) // block_size` hashes."""
    return BlockHashes(prompt, block_size).hashes


def snapshot_names(block_hash: bytes, num_blocks: int) -> list[bytes]:
    """The names of the blocks that hold the state after the block of this hash, in order. They count down:
    the pool evicts the last one first, so all are there if that one is."""
    return [block_hash + struct.pack("<i", i) for i in range(num_blocks - 1, -1, -1)]


def snapshot_key(block_hash: bytes) -> bytes:
    """The last of `snapshot_names`, however many they are."""
    return snapshot_names(block_hash, 1)[0]


def is_announced(name: bytes) -> bool:
    """Whether doors are told of it: of a snapshot they know its key alone."""
    return len(name) <= _DIGEST_BYTES or name == snapshot_key(name[:_DIGEST_BYTES])


def _media_parts(media: Sequence[PlacedMedia], block_size: int, num_tokens: int) -> dict[int, bytes]:
    """What the items add to each block that they touch. The length of each part is included in it, so no part
    can imitate two parts."""
    parts: dict[int, bytes] = {}
    for item in media:
        name = f"{item.modality}:{item.media_hash}".encode()
        for token, row, count in item.pieces(0, num_tokens):
            first_block, last_block = token // block_size, (token + count - 1) // block_size
            for i in range(first_block, last_block + 1):
                low, high = max(token, i * block_size), min(token + count, (i + 1) * block_size)
                numbers = struct.pack("<qqqq", len(name), low - i * block_size, row + low - token, high - low)
                parts[i] = parts.get(i, b"") + numbers + name
    return parts
