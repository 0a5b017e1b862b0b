"""The one notification of a lease: which lease, which content of which blocks, done or stopped, and the
owner's payload. And what both sides must agree on before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import Contract, Grant
from kv_transfer.checksum import checksum

PROTOCOL = 3


class NoticeKind(StrEnum):
    DONE = "done"  # all bytes are in place
    ABORT = "abort"  # the writer has stopped and will not write again


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    lease_id: str
    digest: bytes  # `digest_grant` of the grant the writer worked from
    kind: NoticeKind
    payload: bytes  # done: the caller's bytes; abort: the reason as UTF-8
    written: tuple[int, ...] = ()  # done: the grant's blocks that were written raw, by place, ascending
    checksum: int | None = None  # … of that content, segment by segment; None: not in the writer's CPU memory
    coded: tuple[int, ...] = ()  # done: the grant's groups that were written coded, by place, ascending
    coded_checksum: int | None = None  # … of their wire blocks


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


def checksum_blocks(memory: BlockMemory, block_ids: Sequence[int]) -> int | None:
    """Of these blocks' bytes in all segments, in this order; None where the CPU cannot read them. Reads them once."""
    if memory.buffer.device.type != "cpu":
        return None
    return checksum(memory.descriptors(block_ids))
