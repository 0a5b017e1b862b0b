"""The notification that ends a lease: which lease, which bytes of which blocks, done or stopped, and the
payload for the owner.

Also the contract that both sides must agree on before.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec
import numpy as np

from cluster.kvcache.memory import BlockMemory
from cluster.types.transfer import Contract, Grant
from kv_transfer.codecs.checksum import Checksum

PROTOCOL = 6


class NoticeKind(StrEnum):
    DONE = "done"  # all bytes are in place
    ABORT = "abort"  # the writer has stopped and will not write again


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    lease_id: str
    digest: bytes  # `digest_grant` of the grant that the writer worked from
    kind: NoticeKind
    payload: bytes  # done: the caller's bytes; abort: the reason as UTF-8
    # Places of the grant's blocks that were written raw, ascending. Abort: those that may have been written.
    written: tuple[int, ...] = ()
    checksum: Checksum | None = None  # done: of these blocks, segment by segment
    # Numbers of the grant's groups that were written coded, ascending. Abort: those that may have been
    # written.
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
    """16 bytes that identify the grant's blocks and wire blocks: ids, generations, order, and which blocks of
    the prompts they are."""
    coded = ((), ()) if grant.coded is None else (grant.coded.block_ids, grant.coded.generations)
    digest = hashlib.blake2b(digest_size=16)
    for table in ((grant.block_ids, grant.generations), coded, (grant.first_blocks,)):
        digest.update(len(table[0]).to_bytes(8, "little"))
        digest.update(np.array(table, dtype="<i8").tobytes())
    return digest.digest()


def contract_of(memory: BlockMemory, model: str, codec: str) -> Contract:
    segments = memory.layout.segments
    dtypes = tuple(dict.fromkeys(str(segment.dtype).removeprefix("torch.") for segment in segments))
    return Contract(PROTOCOL, model, segments[0].rows, dtypes, codec, memory.layout.fingerprint)
