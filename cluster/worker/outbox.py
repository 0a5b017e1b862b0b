"""What an engine wants to tell the doors, gathered during a step and handed over once at its end.

Tokens of all requests of one door travel in one frame per step. The load report rides on the frame; a door that gets
no frame this step is sent the load alone when it has changed, so an idle worker says nothing.

Who computes for long at a time (encode, prefill) tells its load when a step begins, not when one ends: what doors have sent
meanwhile would not be in it, just when the answers to that step make clients send more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from cluster.types.messages import LoadReport, ChannelMessage, TokenEvent, Tokens

DoorId = int  # one connection of one door; unique in this process, never reused
Deliver = Callable[[list[tuple[DoorId, ChannelMessage]]], None]


class Outbox:
    """Owned by the engine's thread. `deliver` must be safe to call from there."""

    def __init__(self, deliver: Deliver):
        self._deliver = deliver
        self._messages: list[tuple[DoorId, ChannelMessage]] = []
        self._events: dict[DoorId, list[TokenEvent]] = defaultdict(list)
        self._doors: set[DoorId] = set()
        self._last_load: LoadReport | None = None
        self._greetings: list[Callable[[], ChannelMessage]] = []

    def greet_with(self, greeting: Callable[[], ChannelMessage]) -> None:
        """One more thing that a door is told when it connects, made at that moment."""
        self._greetings.append(greeting)

    def add_door(self, door: DoorId) -> None:
        self._doors.add(door)
        self._messages += [(door, greeting()) for greeting in self._greetings]
        self._last_load = None  # the newcomer is told the load at the next flush

    def remove_door(self, door: DoorId) -> None:
        self._doors.discard(door)

    def send(self, door: DoorId, message: ChannelMessage) -> None:
        self._messages.append((door, message))

    def broadcast(self, message: ChannelMessage) -> None:
        """To every door that is connected now."""
        self._messages += [(door, message) for door in self._doors]

    def token(self, door: DoorId, event: TokenEvent) -> None:
        self._events[door].append(event)

    def flush(self, load: LoadReport | None = None) -> None:
        """Hand over everything gathered since the last flush. None: the load is told with the next flush."""
        changed = load is not None and load != self._last_load
        out = [(door, message) for door, message in self._messages if door in self._doors]
        for door in self._doors:
            events = self._events.get(door)
            if events or changed:
                out.append((door, Tokens(tuple(events or ()), load)))
        self._messages.clear()
        self._events.clear()
        self._last_load = load or self._last_load
        if out:
            self._deliver(out)
