"""The door process's end of Serve's membership push: the replicas that Serve lists now, per role.

One registry per process. Serve's router thread writes (`HookRouter.update_replicas`) and the door's event
loop reads (`subscribe`). A subscriber gets the current state at once and then every change, in order, on its
own loop. A `Member` travels as replica metadata of Serve, which is a dict of plain values. Imports no Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cluster.types.members import Member, Role

_KEY = "member"  # of the replica metadata

OnMembers = Callable[[Role, list[Member]], None]


class Membership:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[Role, list[Member]] = {}
        self._subscribers: list[tuple[asyncio.AbstractEventLoop, OnMembers]] = []

    def publish(self, role: Role, members: list[Member]) -> None:
        """Any thread. The list replaces the previous one of the role."""
        with self._lock:
            self._members[role] = members
            for loop, callback in self._subscribers:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(callback, role, members)

    def subscribe(self, callback: OnMembers) -> Callable[[], None]:
        """Call it on the loop that shall run `callback`. Returns a function that ends the subscription."""
        entry = (asyncio.get_running_loop(), callback)
        with self._lock:
            self._subscribers.append(entry)
            for role, members in self._members.items():
                entry[0].call_soon_threadsafe(callback, role, members)

        def cancel() -> None:
            with self._lock:
                if entry in self._subscribers:
                    self._subscribers.remove(entry)

        return cancel


MEMBERSHIP = Membership()  # the one of this process


def encode_member(member: Member) -> dict[str, str]:
    return {_KEY: msgspec.json.encode(member).decode()}


def decode_members(metadata: Iterable[dict[str, Any]]) -> list[Member]:
    """The published members. Replicas that have not published yet are left out; a later push contains
    them."""
    return [msgspec.json.decode(entry[_KEY], type=Member) for entry in metadata if _KEY in entry]
