"""Where the time of one request went, at one worker."""

from __future__ import annotations

import msgspec


class EncodeTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one item at its encoder, from the arrival of StartEncode to the end of the transfer, in
    order of time."""

    preparing_s: float = 0.0  # waiting for a thread, decoding, preprocessing
    queued_s: float = 0.0  # ready, while the device did other work
    encoding_s: float = 0.0  # from the start of the first call to the end of the last
    target_s: float = 0.0  # the rows exist, prefill's grant has not come
    sending_s: float = 0.0


class PrefillTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one request at the worker that computes its prompt. Their sum is the time from the arrival
    of its start to the first token."""

    blocks_s: float = 0.0  # waiting for KV blocks
    media_s: float = 0.0  # nothing could be computed until more embeddings came
    queued_s: float = 0.0  # could be computed, while the device did other work
    computing_s: float = 0.0  # in steps that computed a part of it
