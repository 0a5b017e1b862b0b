"""The side channel in virtual time: what doors and workers tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.types.messages import ChannelMessage
from deploy.simulator.events import EventLoop, VirtualClock

if TYPE_CHECKING:
    from deploy.simulator.door import SimDoor

NETWORK_S = 5e-4  # a message between a door and a worker


class Network:
    """A message reaches its door or worker `delay_s` after it was sent, which may be inside an event that
    spends time; messages overtake none that were sent before."""

    def __init__(self, loop: EventLoop, clock: VirtualClock, delay_s: float = NETWORK_S):
        self._loop, self._clock, self.delay_s = loop, clock, delay_s
        self.doors: Sequence[SimDoor] = ()

    def tell(self, call: Callable[..., object], *args: Any) -> None:
        """The call happens when the message has arrived."""
        self._loop.at(self._clock.now() + self.delay_s, call, *args)

    def tell_door(self, door: int, replica_id: str, *messages: ChannelMessage) -> None:
        """`door`: its number."""
        self.tell(self.doors[door].receive, replica_id, *messages)

    def tell_doors(self, replica_id: str, *messages: ChannelMessage) -> None:
        """All doors are told the same."""
        for door in self.doors:
            self.tell(door.receive, replica_id, *messages)
