"""Which messages another process has never read.

A connection that breaks does not say which messages are lost with it. So each side of a pair, door and
worker, keeps

* the name of the last message that it has read from the other (`last_read`), and tells it in its `Hello` when
  the two are connected again; a door also in the `Goodbye` before it closes a connection;
* the names of the last messages that it has sent to the other, in order. Those behind the other's `last_read`
  were not read. They never will be: a process closes a connection before it says what it has read over it.

Only messages for which it matters are noted, so nothing needs to be acknowledged: what is forgotten, or not
known, counts as read. The log outlives the connections of a pair, and ends with one of its processes.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from cluster.types.messages import (
    ChannelMessage,
    DecodeGranted,
    DecodeTarget,
    EncodeTarget,
    FeatureGranted,
    GrantPassed,
    ReturnGrant,
)

Entry = TypeVar("Entry")

MAX_SENT = 1000  # more than are on their way at any time


def grant_name(message: ChannelMessage) -> str:
    """Only messages with equal content have equal names. Empty: the message is not about a grant."""
    match message:
        case DecodeGranted() | FeatureGranted() | DecodeTarget() | EncodeTarget():
            return f"{type(message).__name__} {message.grant.lease_id}"
        case GrantPassed() | ReturnGrant():
            return f"{type(message).__name__} {message.lease_id}"
        case _:
            return ""


class SentLog(Generic[Entry]):
    """The log of what was sent to one other process."""

    def __init__(self, peer_name: str, last_read: str | None = ""):
        """`last_read`: None if there may have been a log that was forgotten."""
        self.peer_name = peer_name
        self.last_read = last_read  # see `Hello`
        self._sent: deque[tuple[str, Entry]] = deque(maxlen=MAX_SENT)

    def sent(self, name: str, entry: Entry) -> None:
        """Also for a message that no connection could take. `entry`: what `take_unread` returns for it."""
        self._sent.append((name, entry))

    def take_unread(self, last_read: str | None) -> list[Entry]:
        """In order, each once. `last_read`: see `Hello`."""
        sent = list(self._sent)
        self._sent.clear()
        if last_read is None:
            return []
        # If the name is not there, everything that is there was sent behind it.
        last = max((idx for idx, (name, _) in enumerate(sent) if name == last_read), default=-1)
        return [entry for _, entry in sent[last + 1 :]]
