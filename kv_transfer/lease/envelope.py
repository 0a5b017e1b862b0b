"""The one notification of a lease: which lease, which content of which blocks, done or stopped, and the
owner's payload. And what both sides must agree on before.
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
    kind: Literal["stream", "tensor"]  # `checksum`, `tensor_checksum`
    value: int  # 64 bits


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    lease_id: str
    digest: bytes  # `digest_grant` of the grant the writer worked from
    kind: NoticeKind
    payload: bytes  # done: the caller's bytes; abort: the reason as UTF-8
    # the grant's blocks that were written raw, by place, ascending; abort: those that may have been written to
    written: tuple[int, ...] = ()
    checksum: Checksum | None = None  # done: of that content, segment by segment
    coded: tuple[int, ...] = ()  # likewise: the grant's groups that were written coded
    coded_checksum: Checksum | None = None  # done: of their wire blocks


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes) -> Envelope:
    """Raises `msgspec.MsgspecError` for anything that is not an envelope."""
    return _decoder.decode(data)


def digest_grant(grant: Grant) -> bytes:
    """16 bytes that name the grant's blocks in their generations, in this order, and its wire blocks."""
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
    """Of these blocks' bytes in all segments, in this order. Reads them once; on a GPU beside what else it does."""
    if memory.buffer.device.type == "cpu":
        return Checksum("stream", checksum(memory.descriptors(block_ids)))
    return _tensor_checksum(memory, block_ids)


def has_checksum(memory: BlockMemory, block_ids: Sequence[int], expected: Checksum | None) -> bool:
    """Whether the blocks hold what the writer sent. A GPU cannot tell what a CPU's memory sums up to: then they do."""
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
    """The transfer thread's: it does not wait for the model's steps. Untried on hardware."""
    return torch.cuda.Stream(device)
