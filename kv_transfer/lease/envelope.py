"""The notification that ends a lease: which lease, which bytes of which blocks, done or stopped, and the payload for the owner.

Also the contract that both sides must agree on before, and the checksums of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from functools import cache
from typing import Literal

import msgspec
import numpy as np
import torch

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import Contract, Grant
from kv_transfer.codecs.checksum import checksum, tensor_checksum

PROTOCOL = 5


class NoticeKind(StrEnum):
    DONE = "done"  # all bytes are in place
    ABORT = "abort"  # the writer has stopped and will not write again


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["stream", "tensor"]  # made by `checksum` or by `tensor_checksum`
    value: int  # 64 bits


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    lease_id: str
    digest: bytes  # `digest_grant` of the grant that the writer worked from
    kind: NoticeKind
    payload: bytes  # done: the caller's bytes; abort: the reason as UTF-8
    # Places of the grant's blocks that were written raw, ascending. Abort: those that may have been written.
    written: tuple[int, ...] = ()
    checksum: Checksum | None = None  # done: of these blocks, segment by segment
    # Numbers of the grant's groups that were written coded, ascending. Abort: those that may have been written.
    coded: tuple[int, ...] = ()
    coded_checksum: Checksum | None = None  # done: of the wire blocks of these groups


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes) -> Envelope:
    """Raises `msgspec.MsgspecError` for anything that is not an envelope."""
    return _decoder.decode(data)


def digest_grant(grant: Grant) -> bytes:
    """16 bytes that identify the grant's blocks and wire blocks: ids, generations, order."""
    coded = ((), ()) if grant.coded is None else (grant.coded.block_ids, grant.coded.generations)
    digest = hashlib.blake2b(digest_size=16)
    for table in ((grant.block_ids, grant.generations), coded):
        digest.update(len(table[0]).to_bytes(8, "little"))
        digest.update(np.array(table, dtype="<i8").tobytes())
    return digest.digest()


def contract_of(memory: BlockMemory, model: str, codec: str = "raw") -> Contract:
    segments = memory.layout.segments
    dtypes = tuple(dict.fromkeys(str(segment.dtype).removeprefix("torch.") for segment in segments))
    return Contract(PROTOCOL, model, segments[0].rows, dtypes, codec, memory.layout.fingerprint)


def checksum_blocks(memory: BlockMemory, block_ids: Sequence[int]) -> Checksum:
    """Of the bytes of these blocks in all segments, in this order. Reads them once; on a GPU, on a stream of its own."""
    if memory.buffer.device.type == "cpu":
        return Checksum("stream", checksum(memory.descriptors(block_ids)))
    return _tensor_checksum(memory, block_ids)


def has_checksum(memory: BlockMemory, block_ids: Sequence[int], expected: Checksum | None) -> bool:
    """Whether the blocks hold what the writer sent. True also if it cannot be checked: a GPU cannot compute a CPU's checksum."""
    if expected is None or (expected.kind == "stream" and memory.buffer.device.type != "cpu"):
        return True
    if expected.kind == "tensor":
        return _tensor_checksum(memory, block_ids) == expected
    return checksum_blocks(memory, block_ids) == expected


def _tensor_checksum(memory: BlockMemory, block_ids: Sequence[int]) -> Checksum:
    if not block_ids:
        return Checksum("tensor", 0)
    device = memory.buffer.device
    with torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else nullcontext():
        ids = torch.tensor(block_ids, device=device)
        blocks = (segment.flatten(1).view(torch.uint8).index_select(0, ids) for segment in memory.segments)
        return Checksum("tensor", tensor_checksum(blocks))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of the transfer thread, which so does not wait for the model's steps. Untried on hardware."""
    return torch.cuda.Stream(device)
