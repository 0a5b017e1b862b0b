"""The life of one media item's embeddings, at both workers that hold them. One table allows every change of
phase.

At an encoder:

    PREPARING  waits for a CPU thread, which then decodes and preprocesses its file
               → READY, DISCARDED (bad media)
    READY      its tensors wait for the device and for room in the cache
               → ENCODING, DISCARDED
    ENCODING   has room in the cache; each encoder call writes some of its rows there
               → CACHED, DISCARDED
    CACHED     all rows are in registered memory, for waiting requests or later ones
               → SENDING, DISCARDED (evicted)
    SENDING    rows are being written to prefill workers; they stay until that has ended
               → CACHED

At a prefill worker, one copy serves all requests in work that contain the item:

    QUEUED     waits for room
               → STAGING, DISCARDED
    STAGING    an encoder may write; if its lease ends without embeddings, there is another grant
               → STAGED, STAGING, DISCARDED
    STAGED     rows are merged into each prompt as its chunks are computed
               → DISCARDED (all are merged)
"""

from __future__ import annotations

from enum import Enum


class MediaPhase(Enum):
    PREPARING = "preparing"
    READY = "ready"
    ENCODING = "encoding"
    CACHED = "cached"
    SENDING = "sending"
    QUEUED = "queued"
    STAGING = "staging"
    STAGED = "staged"
    DISCARDED = "discarded"


TRANSITIONS: dict[MediaPhase, frozenset[MediaPhase]] = {
    MediaPhase.PREPARING: frozenset({MediaPhase.READY, MediaPhase.DISCARDED}),
    MediaPhase.READY: frozenset({MediaPhase.ENCODING, MediaPhase.DISCARDED}),
    MediaPhase.ENCODING: frozenset({MediaPhase.CACHED, MediaPhase.DISCARDED}),
    MediaPhase.CACHED: frozenset({MediaPhase.SENDING, MediaPhase.DISCARDED}),
    MediaPhase.SENDING: frozenset({MediaPhase.CACHED}),
    MediaPhase.QUEUED: frozenset({MediaPhase.STAGING, MediaPhase.DISCARDED}),
    MediaPhase.STAGING: frozenset({MediaPhase.STAGED, MediaPhase.STAGING, MediaPhase.DISCARDED}),
    MediaPhase.STAGED: frozenset({MediaPhase.DISCARDED}),
    MediaPhase.DISCARDED: frozenset(),
}


def next_phase(name: str, present: MediaPhase, wanted: MediaPhase) -> MediaPhase:
    """`wanted`, if the table allows it. Raises AssertionError."""
    if wanted not in TRANSITIONS[present]:
        raise AssertionError(f"{name}: {present} cannot become {wanted}")
    return wanted
