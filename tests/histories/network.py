"""Connections between doors and workers: messages of one direction arrive in their order, those of different
connections in any order.

    delay        drawn for each message
    cut          both ends learn it, each in its own time; what is on its way arrives before that, or never
    partition    nothing arrives between two processes until it heals; a connection that was silent for
                 SILENT_S has ended by then, for each end in its own time
    death        the sockets of a process that has ended: what it sent arrives, then the end
    a stopped process reads nothing; its kernel keeps what arrives
    armed        what happens when the next message of a kind is sent, or has arrived: so a fault comes at a
                 step of the protocol, and not only at an instant
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from cluster.types.messages import DecodeGranted, DecodeTarget, EncodeTarget, Failed, FeatureGranted, Tokens
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread

SILENT_S = 5.0  # as in cluster.rpc.server: keepalive, and unacknowledged data
STRAGGLERS, STRAGGLER_S = 0.01, 0.02  # the share of messages that take long, and how long


class End:
    """One end of a connection, as the owner's `Connection`."""

    peer: End

    def __init__(self, network: Network, thread: SimulatedThread, peer_name: str):
        self.is_open = True
        self.thread = thread
        self.peer_name = peer_name
        self.peer_last_read: str | None = None
        self.on_message: Callable[[Any, Any], None] = lambda end, message: None
        self.on_close: Callable[[Any], None] = lambda end: None
        self.arrives_at = 0.0  # of the last message to this end
        self.blocked: deque[Any] = deque()  # messages that a partition holds back
        self.is_deaf = False  # what is on its way will not arrive
        self.is_ended = False  # `on_close` was called, or will not be
        self._network = network

    @property
    def process(self) -> SimulatedProcess:
        return self.thread.process

    def send(self, message: Any) -> None:
        if isinstance(message, DecodeGranted | FeatureGranted):
            self._network.granted_to[message.grant.lease_id] = self.peer.process
        elif isinstance(message, DecodeTarget | EncodeTarget):
            self._network.passed_to[message.grant.lease_id] = self.peer.process
        if self.is_open:
            self._network.send(self.peer, message)
        else:
            self._network.num_lost[type(message).__name__] += 1

    def abort(self) -> None:
        self._network.cut(self, at_once=True)

    async def aclose(self) -> None:
        """What was sent arrives; what is on its way to this end is not read any more."""
        self.is_deaf = True
        self._network.cut(self, at_once=False)


class Network:
    def __init__(self, scheduler: Scheduler, rng: Random):
        self.delay_s: Callable[[], float] = lambda: (
            0.0005 + 0.002 * rng.random() + (STRAGGLER_S if rng.random() < STRAGGLERS else 0.0)
        )
        # By the name of the message, once each; called with the end that it goes to, and with it
        self.when_sent: dict[str, Callable[[End, Any], None]] = {}
        self.when_arrived: dict[str, Callable[[End, Any], None]] = {}
        self.partitions: set[frozenset[SimulatedProcess]] = set()
        # By lease: the door that its grant was sent to, and the worker that this door passed it on to
        self.granted_to: dict[str, SimulatedProcess] = {}
        self.passed_to: dict[str, SimulatedProcess] = {}
        self.num_heard: Counter[str] = Counter()  # messages, by kind
        self.num_lost: Counter[str] = Counter()  # messages into a connection that was cut
        self._scheduler, self._rng = scheduler, rng
        self.ends: list[End] = []

    def connect(self, near: SimulatedThread, far: SimulatedThread) -> tuple[End, End]:
        left, right = End(self, near, far.process.name), End(self, far, near.process.name)
        left.peer, right.peer = right, left
        self.ends = [end for end in self.ends if not end.is_ended]
        self.ends += [left, right]
        return left, right

    def is_parted(self, one: SimulatedProcess, other: SimulatedProcess) -> bool:
        return bool(self.partitions) and frozenset((one, other)) in self.partitions

    def send(self, end: End, message: Any) -> None:
        """To this end."""
        if (happen := self.when_sent.pop(type(message).__name__, None)) is not None:
            happen(end, message)
        end.arrives_at = max(end.arrives_at, self._scheduler.now + self.delay_s())
        self._scheduler.at(end.arrives_at, end.thread, "", self._arrive, end, message)

    def cut(self, end: End, *, at_once: bool) -> None:
        """This end closes the connection. `at_once`: what is on its way is lost."""
        for each in (end, end.peer):
            each.is_open = False
            each.is_deaf |= at_once
            self._close_later(each)

    def part(self, one: SimulatedProcess, other: SimulatedProcess, seconds: float) -> None:
        pair = frozenset((one, other))
        self.partitions.add(pair)
        self._scheduler.after(seconds, None, f"heal {one.name} {other.name}", self._heal, pair)
        for end in self.ends:
            if end.is_open and frozenset((end.process, end.peer.process)) == pair and seconds > SILENT_S:
                silent_s = SILENT_S + 0.5 * self._rng.random()
                self._scheduler.after(silent_s, None, "", self._give_up, end, pair)

    def died(self, process: SimulatedProcess) -> None:
        """Its kernel closes its sockets."""
        for end in self.ends:
            if end.process is process and end.is_open:
                self.cut(end, at_once=False)

    def _arrive(self, end: End, message: Any) -> None:
        if end.is_deaf or end.is_ended:
            self.num_lost[type(message).__name__] += 1
            return
        if end.blocked or self.is_parted(end.process, end.peer.process):
            end.blocked.append(message)
            return
        self._scheduler.step(end.process)
        self.num_heard[type(message).__name__] += 1
        if isinstance(message, Failed):
            self.num_heard[message.error.kind] += 1
        self._scheduler.note(str(end.thread), f"<- {end.peer_name} {describe(message)}")
        end.on_message(end, message)
        if (happen := self.when_arrived.pop(type(message).__name__, None)) is not None:
            happen(end, message)

    def _close_later(self, end: End) -> None:
        end.arrives_at = max(end.arrives_at, self._scheduler.now + self.delay_s())
        self._scheduler.at(end.arrives_at, end.thread, "", self._close, end)

    def _close(self, end: End) -> None:
        if end.is_ended:
            return
        if not end.is_deaf and (end.blocked or self.is_parted(end.process, end.peer.process)):
            self._scheduler.after(0.1, end.thread, "", self._close, end)
            return
        end.is_ended, end.is_open = True, False
        self._scheduler.note(str(end.thread), f"connection to {end.peer_name} has ended")
        end.on_close(end)

    def _give_up(self, end: End, pair: frozenset[SimulatedProcess]) -> None:
        if pair in self.partitions and not end.is_ended:
            end.is_open, end.is_deaf = False, True
            self._close_later(end)

    def _heal(self, pair: frozenset[SimulatedProcess]) -> None:
        self.partitions.discard(pair)
        for end in self.ends:
            if end.blocked and frozenset((end.process, end.peer.process)) == pair:
                self._scheduler.after(0.0, end.thread, "", self._unblock, end)

    def _unblock(self, end: End) -> None:
        """Until it happens, later messages queue behind those that are blocked, also where the process is
        stopped by then."""
        waiting, end.blocked = end.blocked, deque()
        for message in waiting:
            self._arrive(end, message)


def describe(message: Any) -> str:
    """For the trace."""
    name = type(message).__name__
    if isinstance(message, Tokens):
        events = (
            f"{e.request_id}/{e.choice_idx}:{','.join(map(str, e.token_ids))}{'.' if e.finish_reason else ''}"
            for e in message.events
        )
        return f"{name} {' '.join(events)}"
    request = getattr(message, "request", message)
    parts = [name, getattr(request, "request_id", "")]
    for field in ("item_idx", "choice_idx", "lease_id"):
        if getattr(message, field, None) is not None:
            parts.append(f"{field}={getattr(message, field)}")
    if (grant := getattr(message, "grant", None)) is not None:
        parts.append(f"{grant.lease_id} {list(grant.block_ids)}")
    if (error := getattr(message, "error", None)) is not None:
        parts.append(error.message)
    return " ".join(parts)
