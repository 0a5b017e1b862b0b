"""Transfer over torch.distributed: Gloo between CPU memories, NCCL between device memories.

For hosts without NIXL. A writer has one link to each owner that it writes to (`collective_link`): a TCP
connection for small messages (`collective_frames`) and a process group of the two for the bytes
(`collective_group`). There is no default group and no world: agents come and go, and a peer that dies or is
replaced breaks its own links only.

For the caller a write is one-sided. The owner's end checks every target against its registered memory and
receives into it; DONE means that it acknowledged. Neighbouring descriptors travel as one run. Several runs of
a write are gathered into one message, which the owner scatters.

The metadata carries host, port, a random token, the kind of device and the registered ranges. A connection
without the token is dropped. A writer that names other memory is dropped before a byte has moved.

The verbs never wait: the threads of the links dial, make groups and copy, and each of their waits has a
deadline. NCCL is untried on hardware. It refuses two ranks on one GPU: such agents, and those without "nccl"
in `backends`, use Gloo, with a copy through host memory at both ends.
"""

from __future__ import annotations

import atexit
import errno
import logging
import queue
import secrets
import socket
import time
from contextlib import suppress

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState, before_posting
from kv_transfer.agents.collective_frames import Backend
from kv_transfer.agents.collective_link import CollectiveMetadata, IncomingLink, OutgoingLink, PostedWrite
from kv_transfer.agents.regions import RegionTable, check_sizes, locate

logger = logging.getLogger(__name__)

MAX_UNKNOWN_CONNECTIONS = 32  # that have not shown the token; more are closed
CLOSE_TIMEOUT_S = 1.0


def built_backends() -> frozenset[Backend]:
    """The backends that this build of torch has. Raises ConfigError if it cannot make process groups at
    all."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("the collective transport needs a torch with torch.distributed and Gloo")
    return frozenset({"gloo", "nccl"} if dist.is_nccl_available() else {"gloo"})


class CollectiveAgent:
    def __init__(self, name: str, host: str = "127.0.0.1", backends: frozenset[Backend] | None = None):
        """`host`: the address that peers dial, and the only one that this agent listens on."""
        self.name = name
        self._backends = built_backends() if backends is None else backends
        self._token = secrets.token_bytes(32)
        self._host = host
        self._listener = socket.create_server((self._host, 0), backlog=128)
        self._listener.setblocking(False)
        self._table = RegionTable()
        self._peers: dict[
            str, tuple[bytes, OutgoingLink]
        ] = {}  # with the metadata that the link was made from
        self._writers: list[IncomingLink] = []
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._is_closed = False
        # A thread inside torch while the interpreter shuts down would crash the process.
        atexit.register(self.close)

    def register(self, memory: BlockMemory) -> None:
        self._table.register(memory)

    def metadata(self) -> bytes:
        port = self._listener.getsockname()[1]
        device = _identity(self._table.device)
        own = CollectiveMetadata(self.name, self._host, port, self._token, device, self._table.regions)
        return msgspec.msgpack.encode(own)

    def connect(self, metadata: bytes) -> str:
        try:
            owner = msgspec.msgpack.decode(metadata, type=CollectiveMetadata)
        except msgspec.MsgspecError as error:
            raise TransferError(f"agent metadata cannot be read: {error}") from error
        known = self._peers.get(owner.name)
        if known is not None and known[0] == metadata and known[1].error is None:
            return owner.name
        if self._is_closed:
            raise TransferError(f"agent {self.name} is closed")
        self._drop_link(owner.name)
        devices = {owner.device, _identity(self._table.device)}
        can_nccl = "nccl" in self._backends and len(devices) == 2 and "cpu" not in devices
        backend: Backend = "nccl" if can_nccl else "gloo"
        logger.info("agent %s writes to %s over %s", self.name, owner.name, backend)
        self._peers[owner.name] = (metadata, OutgoingLink(self.name, owner, backend, self._table))
        return owner.name

    def post(
        self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b""
    ) -> PostedWrite:
        with before_posting():
            check_sizes(local, remote)
            link = self._link(peer)
            locate(remote, link.owner.regions)
            return link.post(self._table.runs(local), remote, notification)

    def poll(self, handle: PostedWrite) -> TransferState:
        return handle.link.poll(handle)

    def ended_at(self, handle: PostedWrite) -> float | None:
        return handle.sent_at

    def notify(self, peer: str, payload: bytes) -> None:
        self._link(peer).notify(payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._accept()
        for _, link in self._peers.values():
            link.progress()
        received: list[tuple[str, bytes]] = []
        while True:
            try:
                received.append(self._inbox.get_nowait())
            except queue.Empty:
                return received

    def release(self, handle: PostedWrite) -> None:
        with suppress(TransferError):
            self.poll(handle)
        if handle.state is TransferState.PENDING:
            raise TransferError(f"a write to {handle.link.owner.name} is in flight and cannot be cancelled")

    def disconnect(self, peer: str) -> None:
        self._drop_link(peer)
        for writer in self._writers:
            if writer.peer == peer:
                writer.close()

    def close(self) -> None:
        """Waits up to a second for the links' threads."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._listener.close()
        links = [link for _, link in self._peers.values()]
        for link in links:
            link.close(PeerLostError(f"agent {self.name} is closed"))
        for writer in self._writers:
            writer.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (*links, *self._writers):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._peers.clear()
        self._writers.clear()

    def _link(self, peer: str) -> OutgoingLink:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"peer {peer} is not connected")
        return known[1]

    def _drop_link(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            known[1].close(PeerLostError(f"peer {peer} was disconnected"))

    def _accept(self) -> None:
        """Accept new connections, forget those that have ended."""
        if self._is_closed:
            return
        self._writers = [writer for writer in self._writers if not writer.is_over]
        while True:
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    logger.error("agent %s cannot accept connections: %s", self.name, error)
                return
            if sum(writer.peer is None for writer in self._writers) >= MAX_UNKNOWN_CONNECTIONS:
                logger.warning("too many connections without the token; the one from %s is closed", address)
                connection.close()
                continue
            self._writers.append(
                IncomingLink(connection, self._token, self._backends, self._table, self._inbox.put)
            )


def _identity(device: torch.device) -> str:
    """The identity of a device, the same in all processes and on all hosts; "cpu" of the CPU."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
