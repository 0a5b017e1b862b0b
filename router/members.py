"""The workers of the cluster and this door's connection to each.

Serve pushes the list of replicas. Each is dialled until it answers, and again when its connection is lost. A
worker is a candidate while its connection stands and Serve lists it. End-of-file takes a worker out at once,
long before Serve's health check would. A worker that answers and that Serve no longer lists is draining: it
gets nothing new, and the listener closes its connection when its last request is done (`close`).

A worker is in the table before the listener hears of it.

If messages about grants were lost with the last connection, the owners of the grants are told when there is
another one: of a grant that was passed on and not read, that no worker has it; anything else once more. A
connection that this door closes is not made again, so its worker is told before what this door has read.
Lives on the door's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.errors import ClusterError, UnavailableError
from cluster.rpc import Connection, SentLog, connect, grant_name
from cluster.types.curves import Link
from cluster.types.members import Member, Phase, Role
from cluster.types.messages import (
    AdaptersHeld,
    AnyMessage,
    DecodeTarget,
    EncodeTarget,
    Goodbye,
    LoadReport,
    Measured,
    PhasesAssigned,
    ReturnGrant,
    Tokens,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0

# If a message about a grant is not read: the worker that is told, which made the grant, and what it is told
OfGrant = tuple[str, AnyMessage]

Dial = Callable[..., Awaitable[Connection]]  # with the arguments of `connect`


class PeerListener(Protocol):
    def on_joined(self, peer: Peer) -> None: ...

    def on_listed(self, peer: Peer) -> None:
        """`is_listed` may have changed."""
        ...

    def on_message(self, peer: Peer, message: AnyMessage) -> None: ...

    def on_lost(self, peer: Peer) -> None: ...


class Peer:
    """One worker that this door is connected to."""

    def __init__(self, member: Member, connection: Connection, is_listed: bool, log: SentLog[OfGrant]):
        self.member = member
        self.connection = connection
        self.is_listed = is_listed
        self.log = log  # over all connections to this process
        self.assigned = PhasesAssigned(tuple(sorted(member.role.phases)), 0)
        self.loads: dict[Role, LoadReport] = {}  # the last one of each part: the encoder's, the other phases'
        for phase in member.role.phases:
            self.loads[_part(member, phase is Phase.ENCODE)] = LoadReport()
        self.adapters: AdaptersHeld | None = None  # None: it has told none yet, or has no room for any
        self.links: dict[str, Link] = {}  # to workers that it writes to, by replica id; as it measured them

    @property
    def is_idle(self) -> bool:
        """No request holds anything there."""
        return all(load.is_idle for load in self.loads.values())

    def say_goodbye(self) -> None:
        """What comes after this counts as not read. To be called before the connection is closed."""
        self.connection.send(Goodbye(self.log.last_read))

    def reported(self, load: LoadReport) -> None:
        self.loads[_part(self.member, load.is_of_encoder)] = load


def _part(member: Member, is_encoder: bool) -> Role:
    """What a part of the worker is called: as the worker, but the encoder of one that does more is one."""
    return Role.ENCODE if is_encoder else member.role


class MemberTable:
    def __init__(self, name: str, listener: PeerListener, secret: str | None, dial: Dial = connect):
        self._dial_peer = dial
        self._name = name
        self._listener = listener
        self._secret = secret
        self._peers: dict[str, Peer] = {}
        self._listed: dict[Role, dict[str, Member]] = {role: {} for role in Role}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        # By replica id, of workers that were connected, and are connected or listed
        self._logs: dict[str, SentLog[OfGrant]] = {}

    def has(self, phase: Phase) -> bool:
        """Whether a worker that is connected and listed does this phase."""
        return any(peer.is_listed and phase in peer.member.role.phases for peer in self._peers.values())

    def all_peers(self) -> list[Peer]:
        return list(self._peers.values())

    def send(self, replica_id: str, message: AnyMessage, owner: str = "") -> None:
        """Ignored if the worker is gone: the listener has been told. `owner`: of the grant that the message
        passes on. Raises what the connection raises."""
        log, name = self._logs.get(replica_id), grant_name(message)
        if log is not None and name:
            if isinstance(message, DecodeTarget | EncodeTarget):
                log.sent(name, (owner, ReturnGrant(message.grant.lease_id)))
            else:
                log.sent(name, (replica_id, message))
        peer = self._peers.get(replica_id)
        if peer is not None:
            peer.connection.send(message)

    def update(self, role: Role, members: list[Member]) -> None:
        """Serve's current list for one pool."""
        self._listed[role] = {member.replica_id: member for member in members}
        for peer in list(self._peers.values()):
            if peer.member.role is role:
                peer.is_listed = peer.member.replica_id in self._listed[role]
                self._listener.on_listed(peer)
        for member in members:
            self._start_dialling(member)
        known = set(self._peers).union(*self._listed.values())
        self._logs = {replica_id: log for replica_id, log in self._logs.items() if replica_id in known}

    def close(self, replica_id: str) -> None:
        """The worker has drained."""
        peer = self._peers.pop(replica_id, None)
        if peer is not None:
            peer.say_goodbye()
            self._close_later(peer.connection)
            self._listener.on_lost(peer)

    async def aclose(self) -> None:
        for task in self._dialling.values():
            task.cancel()
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.say_goodbye()
        for peer in peers:
            await peer.connection.aclose()

    def _close_later(self, connection: Connection) -> None:
        asyncio.ensure_future(connection.aclose())

    def _start_dialling(self, member: Member) -> None:
        if member.replica_id not in self._peers and member.replica_id not in self._dialling:
            self._dialling[member.replica_id] = asyncio.ensure_future(self._dial(member))

    async def _dial(self, member: Member) -> None:
        """Dials until the member answers or Serve no longer lists it."""
        delay_s = 0.05
        try:
            while (listed := self._listed[member.role].get(member.replica_id)) is not None:
                try:
                    await self._connect(listed)
                    return
                except ClusterError as error:
                    logger.warning("%s at %s does not answer: %s", member.replica_id, member.address, error)
                except Exception:
                    logger.exception("%s could not join", member.replica_id)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, 2.0)
        finally:
            self._dialling.pop(member.replica_id, None)

    async def _connect(self, member: Member) -> None:
        peer: Peer | None = None

        def join(connection: Connection) -> Peer:
            nonlocal peer
            if peer is None:
                log = self._log_of(member.replica_id, connection.peer_name)
                peer = Peer(member, connection, member.replica_id in self._listed[member.role], log)
                self._peers[member.replica_id] = peer
                for owner, message in log.take_unread(connection.peer_last_read):
                    self.send(owner, message)
                try:
                    self._listener.on_joined(peer)
                    self._listener.on_listed(peer)
                except Exception:
                    connection.abort()  # it is dialled again
                    raise
            return peer

        def on_message(connection: Connection, message: AnyMessage) -> None:
            peer = join(connection)  # the greeting may be here before `connect` returns
            if name := grant_name(message):
                peer.log.last_read = name
            if isinstance(message, Tokens) and message.load is not None:
                peer.reported(message.load)
            elif isinstance(message, Measured):
                peer.links |= message.curves.links
            elif isinstance(message, PhasesAssigned):
                peer.assigned = message
            elif isinstance(message, AdaptersHeld):
                peer.adapters = message
            self._listener.on_message(peer, message)

        def on_close(_: Connection) -> None:
            if peer is not None and self._peers.get(member.replica_id) is peer:
                del self._peers[member.replica_id]
                logger.warning("lost %s worker %s", member.role, member.replica_id)
                self._listener.on_lost(peer)
                if member.replica_id in self._listed[member.role]:  # perhaps only the connection has died
                    self._start_dialling(member)

        log = self._logs.get(member.replica_id)
        connection = await self._dial_peer(
            member.address,
            self._name,
            on_message,
            on_close,
            timeout_s=CONNECT_TIMEOUT_S,
            secret=self._secret,
            last_read=None if log is None else log.last_read,
            wanted=member.process_name,
        )
        if not connection.is_open:  # if it had joined, `on_close` has told the listener
            raise UnavailableError("the connection was lost at once")
        join(connection)

    def _log_of(self, replica_id: str, process_name: str) -> SentLog[OfGrant]:
        """What was sent to another process that had the replica's name does not count."""
        log = self._logs.get(replica_id)
        if log is None or log.peer_name != process_name:
            log = self._logs[replica_id] = SentLog(process_name)
        return log
