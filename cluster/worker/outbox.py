"""An engine's messages to the doors, collected during a step and sent once at its end.

Tokens of all requests of one door travel in one frame per step. The load report is part of the frame. A door
that gets no frame in a step gets the load alone if the load has changed. So an idle worker sends nothing.

An engine with long steps (encode, prefill) reports its load when a step begins, not when it ends. A report at
the end would not count the requests that doors have sent meanwhile, just when the answers of that step make
clients send more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from cluster.types.messages import ChannelMessage, LoadReport, TokenEvent, Tokens

DoorId = int  # one connection of one door; unique in this process, never reused
Deliver = Callable[[list[tuple[DoorId, ChannelMessage]]], None]


class Outbox:
    """Owned by the engine's thread. `deliver` must be safe to call from that thread."""

    def __init__(self, deliver: Deliver):
        self._deliver = deliver
        self._messages: list[tuple[DoorId, ChannelMessage]] = []
        self._events: dict[DoorId, list[TokenEvent]] = defaultdict(list)
        self._doors: set[DoorId] = set()
        self._last_load: LoadReport | None = None
        self.load = LoadReport()  # the last one that was given here; any thread may read it
        self._greetings: list[Callable[[], ChannelMessage]] = []

    def greet_with(self, greeting: Callable[[], ChannelMessage]) -> None:
        """One more message for each door that connects. `greeting()` is called at that moment."""
        self._greetings.append(greeting)

    def add_door(self, door: DoorId) -> None:
        self._doors.add(door)
        self._messages += [(door, greeting()) for greeting in self._greetings]
        self._last_load = None  # the new door gets the load at the next flush

    def remove_door(self, door: DoorId) -> None:
        self._doors.discard(door)

    def send(self, door: DoorId, message: ChannelMessage) -> None:
        self._messages.append((door, message))

    def broadcast(self, message: ChannelMessage) -> None:
        """Sends the message to every door that is connected now."""
        self._messages += [(door, message) for door in self._doors]

    def token(self, door: DoorId, event: TokenEvent) -> None:
        self._events[door].append(event)

    def flush(self, load: LoadReport | None = None) -> None:
        """Sends everything collected since the last flush. None: the load is sent with the next flush."""
        changed = load is not None and load != self._last_load
        out = self._messages  # also to doors that have gone: `WorkerShell.send` knows what that means
        for door in self._doors:
            events = self._events.get(door)
            if events or changed:
                out.append((door, Tokens(tuple(events or ()), load)))
        self._messages = []
        self._events.clear()
        self._last_load = load or self._last_load
        self.load = load or self.load
        if out:
            self._deliver(out)
