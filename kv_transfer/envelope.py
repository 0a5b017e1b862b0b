"""The one notification of a lease: which lease, which content of which blocks, done or stopped, and the
owner's payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np


class NoticeKind(StrEnum):
    DONE = "done"  # all bytes are in place
    ABORT = "abort"  # the writer has stopped and will not write again


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    lease_id: str
    digest: bytes  # `digest_blocks` of the grant the writer worked from
    kind: NoticeKind
    payload: bytes  # done: the caller's bytes; abort: the reason as UTF-8


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes) -> Envelope:
    """Raises `msgspec.MsgspecError` for anything that is not an envelope."""
    return _decoder.decode(data)


def digest_blocks(block_ids: Sequence[int], generations: Sequence[int]) -> bytes:
    """16 bytes that name these blocks in these generations, in this order."""
    table = np.array([block_ids, generations], dtype="<i8")
    return hashlib.blake2b(table.tobytes(), digest_size=16).digest()
