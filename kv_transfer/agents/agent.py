"""What every transport must do, in NIXL's own nouns. `kv_transfer.lease` uses nothing else of a transport.

Call order:

    register(memory)             once per memory, before metadata() is given to a peer; repeating it is harmless
    metadata()                   opaque bytes, sent to peers inside a grant
    connect(metadata) -> peer    any number of times; cheap if the bytes are known
    post(peer, local, remote)    one-sided write; may copy inside the call (NIXL on one host does)
    poll(handle)                 until it is DONE or FAILED
    release(handle)              once per handle, when its write is over
    notify(peer, payload)        any time after connect; arrives after writes that were DONE before the call
    notifications()              often, while anything is open: it also drives connecting and progress
    disconnect(peer)             the peer is gone; a later connect makes a new connection
    close()

An agent belongs to one thread at a time. Its name is unique per incarnation of a process. The verbs raise
only the errors below; the transport's own errors are translated.

    UnavailableError
    └── TransferError           this transfer failed; the request may be retried elsewhere
        ├── NotPostedError      this write was refused, and no part of it was posted
        ├── PeerLostError       the peer process or the connection is gone; disconnect it
        ├── LeaseExpiredError   the grant's time is over; nothing was posted after it
        └── LayoutMismatchError the two memories do not have equal layouts
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import numpy as np

from cluster.errors import UnavailableError
from cluster.kvcache.memory import BlockMemory

TransferHandle = Any  # opaque; only the agent that made it looks inside


class TransferError(UnavailableError):
    """A transfer failed; the request may be retried with other workers."""


class NotPostedError(TransferError):
    """A write was refused before any part of it was posted."""


class PeerLostError(TransferError):
    """The peer process, or the connection to it, is gone."""


class LeaseExpiredError(TransferError):
    """The writer's time is over; nothing was posted after it."""


class LayoutMismatchError(TransferError):
    """Writer and owner have different layouts of a block: they run different models or configurations."""


@contextmanager
def before_posting() -> Iterator[None]:
    """What fails in here fails before a part of the write is posted. A lost peer stays one."""
    try:
        yield
    except PeerLostError:
        raise
    except TransferError as error:
        raise NotPostedError(error.message) from error


class TransferState(Enum):
    PENDING = "pending"
    DONE = "done"  # the bytes are in the peer's memory
    FAILED = "failed"  # any part of them may be in the peer's memory


class Agent(Protocol):
    @property
    def name(self) -> str: ...

    def register(self, memory: BlockMemory) -> None: ...

    def metadata(self) -> bytes: ...

    def connect(self, metadata: bytes) -> str:
        """The peer's name. If the bytes are known, returns at once. Other bytes of a known name replace the
        old peer."""
        ...

    def post(
        self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b""
    ) -> TransferHandle:
        """Start writing `local[i]` to `remote[i]`; both are [n, 2] uint64 (address, bytes), n >= 1.

        The source must not change until the handle is DONE or FAILED. If it raises anything but a
        NotPostedError, a part may have been posted. A notification that is not empty reaches the peer after
        the bytes. On a GPU the caller has synchronised with the kernels that filled the source.
        """
        ...

    def poll(self, handle: TransferHandle) -> TransferState:
        """If it raises, the write has FAILED."""
        ...

    def ended_at(self, handle: TransferHandle) -> float | None:
        """When a write that is DONE had left, by `time.monotonic`; None: this transport knows only that it
        was over when it was polled."""
        ...

    def notify(self, peer: str, payload: bytes) -> None: ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer name, payload) of all that came in since the last call; drives the transport."""
        ...

    def release(self, handle: TransferHandle) -> None:
        """Forget a handle whose write is over. No transport can call a write off: if this one is still
        PENDING after one more look, raises TransferError, and the handle is kept."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drop the peer, known or not. Never raises for a peer that is already gone. The next poll of a write
        to it says DONE if the peer had answered by then, FAILED (or raises) if not. If the connection was
        still whole, bytes of a FAILED write may land later, so disconnect only after PeerLostError."""
        ...

    def close(self) -> None: ...
