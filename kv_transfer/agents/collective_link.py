"""The two ends of one writer's link to one owner. Each end has a thread of its own; the agent's verbs never
block on it.

    OutgoingLink  thread: dial, greet, make the group; then for every post: header, bytes
                  agent:  post, notify, poll; when the link is up, reads acknowledgements without waiting
    IncomingLink  thread: check the token, make the group; then read headers, check every target, receive the
                  bytes into registered memory, put the notification into the inbox and acknowledge

On a GPU each thread has a stream of its own, so that no copy waits for a step of the model.

A link that breaks, at either end and for any reason, ends for good, with all its posts. The next `connect`
dials a new one.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState
from kv_transfer.agents.collective_frames import (
    MAX_FRAME_BYTES,
    Acknowledgement,
    Backend,
    Frame,
    FrameSocket,
    Greeting,
    Notification,
    PostHeader,
    Ready,
    Refusal,
    StoreItem,
    refused,
)
from kv_transfer.agents.collective_group import Channel, PairStore
from kv_transfer.agents.regions import Region, RegionTable

logger = logging.getLogger(__name__)

WIRE_UP_TIMEOUT_S = 5.0  # for each step of it
WRITE_TIMEOUT_S = 3.0
_ROW = np.dtype("<u8")


class CollectiveMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know to write here. Knowing it is the right to write: it travels inside grants
    only."""

    name: str
    host: str
    port: int
    token: bytes
    device: str  # "cpu", or the identity of a GPU
    regions: tuple[Region, ...]


@dataclass(eq=False)
class PostedWrite:
    """The handle of one post."""

    link: OutgoingLink
    runs: list[torch.Tensor]
    header: PostHeader
    sent_at: float | None = None  # its bytes have left; set by the link's thread
    is_acknowledged: bool = False  # its bytes are in the peer's memory; set by the agent's thread
    state: TransferState = TransferState.PENDING


class OutgoingLink:
    def __init__(self, own_name: str, owner: CollectiveMetadata, backend: Backend, table: RegionTable):
        """Starts to dial at once."""
        self.owner = owner
        self.error: TransferError | None = None  # set once
        self._greeting = Greeting(owner.token, own_name, backend)
        self._table = table
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[PostedWrite | Notification | None] = queue.SimpleQueue()
        self._unfinished: dict[int, PostedWrite] = {}  # by number; agent's thread only
        self._num_posts = 0
        self._failure: TransferError | None = None  # written by the link's thread, read by the agent's
        self._frames: FrameSocket | None = None
        self._channel: Channel | None = None
        self._is_up = False
        self._thread = threading.Thread(target=self._run, name=f"writes-to-{owner.name}", daemon=True)
        self._thread.start()

    def post(self, runs: list[torch.Tensor], rows: np.ndarray, notification: bytes) -> PostedWrite:
        """Queue one write. Raises if the link is over or the header would be too long."""
        self.progress()
        header = PostHeader(self._num_posts, rows.astype(_ROW, copy=False).tobytes(), notification)
        if len(header.rows) + len(notification) > MAX_FRAME_BYTES - 64:
            raise TransferError(f"{len(rows)} descriptors are more than one write can carry")
        self._raise_if_over()
        self._num_posts += 1
        write = PostedWrite(self, runs, header)
        self._unfinished[header.number] = write
        self._waiting.put(write)
        return write

    def notify(self, payload: bytes) -> None:
        self.progress()
        self._raise_if_over()
        self._waiting.put(Notification(payload))

    def progress(self) -> None:
        """Take in the owner's answers. Never raises; `error` says why it failed."""
        if self.error is not None:
            return
        failure = self._failure  # read first: answers that came before it still count
        try:
            if self._is_up and self._frames is not None:
                for frame in self._frames.read_available():
                    self._take(frame)
        except TransferError as error:
            failure = error
        if failure is not None:
            self.close(failure)

    def poll(self, write: PostedWrite) -> TransferState:
        """Raises the link's error, once for each write that failed with it."""
        if write.state is TransferState.PENDING:
            self.progress()
            if write.is_acknowledged and write.sent_at is not None:
                write.state = TransferState.DONE
            elif self.error is not None:
                write.state = TransferState.FAILED
                raise self.error
        return write.state

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
            self._table.use_own_stream()
            self._wire_up()
            while (item := self._waiting.get()) is not None:
                self._carry(item)
        except TransferError as error:
            self._failure = error
        except Exception as error:  # the thread's edge: the agent's thread reports it
            logger.exception("the link to %s failed", self.owner.name)
            self._failure = TransferError(f"internal error: {error!r}")
        finally:
            if self._channel is not None:
                self._channel.sever()
            # The connection stays readable: it may still hold the owner's last frames.

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
        frames.write(self._greeting, WIRE_UP_TIMEOUT_S)
        _await_ready(frames)
        channel = _make_channel(frames, 0, self._greeting.backend, self._table, connection)
        _await_ready(frames)
        with self._lock:
            self._channel = channel
            if self.error is not None:
                raise self.error
        self._is_up = True

    def _carry(self, item: PostedWrite | Notification) -> None:
        frames, channel = self._frames, self._channel
        assert frames is not None and channel is not None
        if isinstance(item, Notification):
            frames.write(item, WRITE_TIMEOUT_S)
            return
        if self.error is not None:
            return
        frames.write(item.header, WRITE_TIMEOUT_S)
        channel.send(item.runs)
        item.sent_at = time.monotonic()


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
        self.peer: str | None = None  # None: it has not shown the token yet
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
            self._table.use_own_stream()
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
        greeting = self._frames.read(WIRE_UP_TIMEOUT_S)
        if not isinstance(greeting, Greeting) or not hmac.compare_digest(greeting.token, self._token):
            raise PeerLostError("the connection did not show the token")
        self.peer = greeting.name
        if greeting.backend not in self._backends:
            raise TransferError(f"this agent has no backend {greeting.backend}")
        self._frames.allow(MAX_FRAME_BYTES)
        self._frames.write(Ready(), WIRE_UP_TIMEOUT_S)
        channel = _make_channel(self._frames, 1, greeting.backend, self._table, self._connection)
        with self._lock:
            self._channel = channel
            if self._is_closed:
                raise PeerLostError("the link was closed while it was made")
        self._frames.write(Ready(), WIRE_UP_TIMEOUT_S)
        return channel

    def _serve(self, channel: Channel, frame: Frame) -> None:
        assert self.peer is not None
        if isinstance(frame, Notification):
            self._deliver((self.peer, frame.payload))
            return
        if isinstance(frame, StoreItem):
            return  # left over from making the group
        if not isinstance(frame, PostHeader) or not frame.rows or len(frame.rows) % 16:
            raise TransferError(f"the {type(frame).__name__} is out of place or malformed")
        rows = np.frombuffer(frame.rows, dtype=_ROW).reshape(-1, 2).astype(np.uint64, copy=False)
        channel.receive(self._table.runs(rows))
        if frame.notification:
            self._deliver((self.peer, frame.notification))
        self._frames.write(Acknowledgement(frame.number), WRITE_TIMEOUT_S)

    def _refuse(self, error: TransferError) -> None:
        if self.peer is None:
            return  # without the token there is no answer
        with suppress(TransferError):  # the writer is gone already
            self._frames.write(Refusal(error.message), WRITE_TIMEOUT_S)


def _await_ready(frames: FrameSocket) -> None:
    while not isinstance(frame := frames.read(WIRE_UP_TIMEOUT_S), Ready):
        if not isinstance(frame, StoreItem):  # the group need not have asked for all of them
            raise refused(frame)


def _make_channel(
    frames: FrameSocket, rank: int, backend: Backend, table: RegionTable, connection: socket.socket
) -> Channel:
    """The group over a greeted connection. It listens on the address of that connection and on no other
    interface."""
    try:
        host = connection.getsockname()[0]
    except OSError as error:
        raise PeerLostError(f"the connection broke: {error}") from error
    store = PairStore(frames, WIRE_UP_TIMEOUT_S)
    return Channel(store, rank, backend, table.device, host, WIRE_UP_TIMEOUT_S)
