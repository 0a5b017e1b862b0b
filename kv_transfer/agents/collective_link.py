"""The two ends of one writer's way to one owner. Each end has a thread of its own; the agent's verbs never block on it.

    OutgoingLink  thread: dial, greet, make the group; then for every post: header, bytes. Writes the connection.
                  agent:  post, notify, poll; once the link is up it reads acknowledgements, without waiting.
    IncomingLink  thread: check the token, make the group; then read headers, check every target, receive the bytes
                  into registered memory, hand the notification to the inbox and acknowledge.

A link that breaks, at either end and for whatever reason, ends for good with all its posts; a new one is dialled.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState
from kv_transfer.agents.collective_wire import (
    MAX_FRAME_BYTES,
    Acknowledgement,
    Backend,
    Channel,
    Frame,
    FrameSocket,
    Hello,
    Notice,
    PairStore,
    Post,
    Ready,
    Refusal,
    StoreItem,
    refused,
)
from kv_transfer.agents.regions import Region, RegionTable

logger = logging.getLogger(__name__)

WIRE_UP_TIMEOUT_S = 5.0  # for each step of it
WRITE_TIMEOUT_S = 3.0
_ROW = np.dtype("<u8")


class AgentMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know to write here. Whoever has it may: it travels inside grants only."""

    name: str
    host: str
    port: int
    token: bytes
    device: str  # "cpu" or "cuda"
    regions: tuple[Region, ...]


@dataclass(eq=False)
class Write:
    """One post. The link's lock guards `is_started` and `is_cancelled`."""

    link: OutgoingLink
    runs: list[torch.Tensor]
    header: Post
    is_started: bool = False  # its header is out, or about to be
    is_cancelled: bool = False
    is_sent: bool = False  # its bytes have left; set by the link's thread
    is_acknowledged: bool = False  # its bytes are in the peer's memory; set by the agent's
    state: TransferState = TransferState.PENDING


class OutgoingLink:
    def __init__(self, own_name: str, owner: AgentMetadata, backend: Backend, table: RegionTable):
        """Starts to dial at once."""
        self.owner = owner
        self.error: TransferError | None = None  # set once, for good
        self._hello = Hello(owner.token, own_name, backend)
        self._table = table
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Write | Notice | None] = queue.SimpleQueue()
        self._unfinished: dict[int, Write] = {}  # by number; the agent's thread only
        self._num_posts = 0
        self._failure: TransferError | None = None  # the thread's, for the agent's to find
        self._frames: FrameSocket | None = None
        self._channel: Channel | None = None
        self._is_up = False
        self._thread = threading.Thread(target=self._run, name=f"writes-to-{owner.name}", daemon=True)
        self._thread.start()

    def post(self, runs: list[torch.Tensor], rows: np.ndarray, notification: bytes) -> Write:
        """Queue one write. Raises when the link is over or the header would be too long."""
        self.progress()
        header = Post(self._num_posts, rows.astype(_ROW, copy=False).tobytes(), notification)
        if len(header.rows) + len(notification) > MAX_FRAME_BYTES - 64:
            raise TransferError(f"{len(rows)} descriptors are more than one write can carry")
        self._raise_if_over()
        self._num_posts += 1
        write = Write(self, runs, header)
        self._unfinished[header.number] = write
        self._waiting.put(write)
        return write

    def notify(self, payload: bytes) -> None:
        self.progress()
        self._raise_if_over()
        self._waiting.put(Notice(payload))

    def progress(self) -> None:
        """Take in what the owner answered; never raises, see `error`."""
        if self.error is not None:
            return
        failure = self._failure  # read first: what came in before it still counts
        try:
            if self._is_up and self._frames is not None:
                for frame in self._frames.read_available():
                    self._take(frame)
        except TransferError as error:
            failure = error
        if failure is not None:
            self.close(failure)

    def poll(self, write: Write) -> TransferState:
        """Raises the link's error once per write that it cost."""
        if write.state is TransferState.PENDING:
            self.progress()
            if write.is_acknowledged and write.is_sent:
                write.state = TransferState.DONE
            elif self.error is not None:
                write.state = TransferState.FAILED
                raise self.error
        return write.state

    def cancel(self, write: Write) -> None:
        """Forget a write. Raises TransferError when it is under way."""
        with self._lock:
            if write.state is TransferState.PENDING and write.is_started and self.error is None:
                raise TransferError(f"a write to {self.owner.name} is under way and cannot be taken back")
            write.is_cancelled = True
        self._unfinished.pop(write.header.number, None)
        if write.state is TransferState.PENDING:
            write.state = TransferState.FAILED

    def close(self, error: TransferError) -> None:
        """End the link: all its writes fail with `error`. May be repeated."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self._unfinished.clear()
        self._waiting.put(None)
        if self._frames is not None:
            self._frames.shut()
        if self._channel is not None:
            self._channel.sever()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _take(self, frame: Frame) -> None:
        write = self._unfinished.pop(frame.number, None) if isinstance(frame, Acknowledgement) else None
        if write is None:
            raise refused(frame)
        write.is_acknowledged = True

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise PeerLostError(f"peer {self.owner.name} is gone: {self.error}") from self.error

    def _run(self) -> None:
        try:
            self._wire_up()
            while (item := self._waiting.get()) is not None:
                self._carry(item)
        except TransferError as error:
            self._failure = error
        except Exception as error:  # the thread's edge: the agent's thread finds it
            logger.exception("the link to %s failed", self.owner.name)
            self._failure = TransferError(f"internal error: {error!r}")
        finally:
            if self._channel is not None:
                self._channel.sever()
            # The connection stays readable: the owner's last words may still be in it.

    def _wire_up(self) -> None:
        owner = self.owner
        try:
            connection = socket.create_connection((owner.host, owner.port), WIRE_UP_TIMEOUT_S)
        except OSError as error:
            raise PeerLostError(f"peer {owner.name} cannot be reached: {error}") from error
        frames = FrameSocket(connection, MAX_FRAME_BYTES)
        with self._lock:
            self._frames = frames
            if self.error is not None:
                frames.shut()
        frames.write(self._hello, WIRE_UP_TIMEOUT_S)
        _await_ready(frames)
        channel = _make_channel(frames, 0, self._hello.backend, self._table, connection)
        _await_ready(frames)
        with self._lock:
            self._channel = channel
            if self.error is not None:
                raise self.error
        self._is_up = True

    def _carry(self, item: Write | Notice) -> None:
        frames, channel = self._frames, self._channel
        assert frames is not None and channel is not None
        if isinstance(item, Notice):
            frames.write(item, WRITE_TIMEOUT_S)
            return
        with self._lock:
            if item.is_cancelled or self.error is not None:
                return
            item.is_started = True
        frames.write(item.header, WRITE_TIMEOUT_S)
        channel.send(item.runs)
        item.is_sent = True


class IncomingLink:
    """`deliver((peer, payload))` is called on the link's thread for every notification."""

    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        backends: frozenset[Backend],
        table: RegionTable,
        deliver: Callable[[tuple[str, bytes]], None],
    ):
        self.peer: str | None = None  # None: a stranger, who has not shown the token yet
        self._connection = connection
        self._frames = FrameSocket(connection)
        self._token = token
        self._backends = backends
        self._table = table
        self._deliver = deliver
        self._lock = threading.Lock()
        self._is_closed = False
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="accepted-writer", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the link from the agent's thread. May be repeated."""
        with self._lock:
            self._is_closed = True
        self._frames.shut()
        if self._channel is not None:
            self._channel.sever()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            channel = self._welcome()
            while True:
                self._serve(channel, self._frames.read(None))
        except PeerLostError as error:
            logger.debug("the link of writer %s ended: %s", self.peer, error)
        except TransferError as error:
            logger.warning("writer %s is dropped: %s", self.peer or "of unknown name", error)
            self._refuse(error)
        except Exception:  # the thread's edge: the writer sees end-of-file
            logger.exception("the link of writer %s failed", self.peer)
        finally:
            self._frames.shut()
            if self._channel is not None:
                self._channel.sever()

    def _welcome(self) -> Channel:
        hello = self._frames.read(WIRE_UP_TIMEOUT_S)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self._token):
            raise PeerLostError("a stranger dialled")
        self.peer = hello.name
        if hello.backend not in self._backends:
            raise TransferError(f"this agent has no {hello.backend}")
        self._frames.max_frame_bytes = MAX_FRAME_BYTES
        self._frames.write(Ready(), WIRE_UP_TIMEOUT_S)
        channel = _make_channel(self._frames, 1, hello.backend, self._table, self._connection)
        with self._lock:
            self._channel = channel
            if self._is_closed:
                raise PeerLostError("closed while it was made")
        self._frames.write(Ready(), WIRE_UP_TIMEOUT_S)
        return channel

    def _serve(self, channel: Channel, frame: Frame) -> None:
        assert self.peer is not None
        if isinstance(frame, Notice):
            self._deliver((self.peer, frame.payload))
            return
        if isinstance(frame, StoreItem):
            return  # the group did not ask for it
        if not isinstance(frame, Post) or not frame.rows or len(frame.rows) % 16:
            raise TransferError(f"a {type(frame).__name__} makes no sense here")
        rows = np.frombuffer(frame.rows, dtype=_ROW).reshape(-1, 2).astype(np.uint64, copy=False)
        channel.receive(self._table.runs(rows))
        if frame.notification:
            self._deliver((self.peer, frame.notification))
        self._frames.write(Acknowledgement(frame.number), WRITE_TIMEOUT_S)

    def _refuse(self, error: TransferError) -> None:
        if self.peer is None:
            return  # strangers hear nothing
        with suppress(TransferError):  # it is gone already
            self._frames.write(Refusal(error.message), WRITE_TIMEOUT_S)


def _await_ready(frames: FrameSocket) -> None:
    while not isinstance(frame := frames.read(WIRE_UP_TIMEOUT_S), Ready):
        if not isinstance(frame, StoreItem):  # of those the group may not have asked for all
            raise refused(frame)


def _make_channel(
    frames: FrameSocket, rank: int, backend: Backend, table: RegionTable, connection: socket.socket
) -> Channel:
    """The group over a greeted connection; it listens where that connection ends, on no other interface."""
    try:
        host = connection.getsockname()[0]
    except OSError as error:
        raise PeerLostError(f"the connection broke: {error}") from error
    store = PairStore(frames, WIRE_UP_TIMEOUT_S)
    return Channel(store, rank, backend, table.device, host, WIRE_UP_TIMEOUT_S)
