"""Which workers move, as this door sees it.

A worker is silent while it says so of its engine or its mover (`Stalled`), or while it does not answer: its event loop is blocked, or its process
is stopped. Workers are asked (`Ping`) only while this door has a request with them and nothing has come for a while: an idle cluster says
nothing, and a busy worker's frames of tokens are answer enough. So a worker that stops while it has no work is found with its first request.

    quiet for QUIET_S                 asked
    no answer for ANSWER_S            silent: placements avoid it while there is another
    silent for MOVE_S                 its media items go to other encoders
    a message from it                 it moves again, if it has not said otherwise

From a stop to avoidance: QUIET_S + ANSWER_S and two looks, 1.75 s at most. Prompts and answers stay where they are: they go on when the
worker does, or end when it hangs up, is replaced, or their time is over. Lives on the door's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.types.messages import Ping
from router.members import Peer

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
QUIET_S = 0.5
ANSWER_S = 0.75
MOVE_S = 10.0
LATE_S = 0.5  # a look that comes later than this found the door itself held up: nothing is said of workers


@dataclass(eq=False, slots=True)
class _Seen:
    """Of one worker."""

    heard_at: float
    asked_at: float | None = None  # and not answered
    is_unanswered: bool = False
    is_stalled: bool = False
    silent_since: float = 0.0
    has_moved_items: bool = False


class PeerWatch:
    def __init__(
        self, clock: Clock, on_changed: Callable[[Peer], None], on_long_silent: Callable[[Peer], None]
    ):
        """`on_changed`: `Peer.is_silent` has. `on_long_silent`: once for each silence."""
        self._clock = clock
        self._on_changed = on_changed
        self._on_long_silent = on_long_silent
        self._peers: dict[Peer, _Seen] = {}
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_silences = 0  # since the start

    def add(self, peer: Peer) -> None:
        self._peers[peer] = _Seen(self._clock.now())

    def remove(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def heard(self, peer: Peer) -> None:
        """Whatever it has said."""
        seen = self._peers.get(peer)
        if seen is None:
            return
        seen.heard_at = self._clock.now()
        if seen.asked_at is not None:
            seen.asked_at, seen.is_unanswered = None, False
            self._update(peer, seen)

    def told(self, peer: Peer, is_stalled: bool) -> None:
        """What it says of its own threads."""
        seen = self._peers.get(peer)
        if seen is not None:
            seen.is_stalled = is_stalled
            self._update(peer, seen)

    def begin(self) -> None:
        """There is a request. Looks go on until there is none."""
        if self._timer is None:
            self._looked_at = self._clock.now()
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_on)

    def look(self) -> bool:
        """Once. False: no worker has a request of this door."""
        now = self._clock.now()
        was_late = now - self._looked_at > LOOK_EVERY_S + LATE_S
        self._looked_at = now
        is_needed = False
        for peer, seen in list(self._peers.items()):
            if peer.num_flights == 0:
                continue
            is_needed = True
            if seen.asked_at is None:
                if now - seen.heard_at >= QUIET_S:
                    seen.asked_at = now
                    peer.send(Ping())
            elif was_late:  # its answer may be here, unread
                seen.asked_at = now
            elif now - seen.asked_at >= ANSWER_S:
                seen.is_unanswered = True
                self._update(peer, seen)
            if peer.is_silent and now - seen.silent_since >= MOVE_S and not seen.has_moved_items:
                seen.has_moved_items = True
                logger.warning("%s worker %s does not move", peer.member.role, peer.member.replica_id)
                self._on_long_silent(peer)
        return is_needed

    def _look_on(self) -> None:
        is_needed = True
        try:
            is_needed = self.look()
        except Exception:
            logger.exception("a look at the workers failed")
        self._timer = None
        if is_needed:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_on)

    def _update(self, peer: Peer, seen: _Seen) -> None:
        is_silent = seen.is_stalled or seen.is_unanswered
        if is_silent == peer.is_silent:
            return
        peer.is_silent = is_silent
        if is_silent:
            self.num_silences += 1
            seen.silent_since, seen.has_moved_items = self._clock.now(), False
        name = f"{peer.member.role} worker {peer.member.replica_id}"
        logger.info("%s %s", name, "does not move" if is_silent else "moves again")
        self._on_changed(peer)
