"""Transfer over torch.distributed: Gloo between CPU memories, NCCL between device memories.

For hosts without NIXL. Each writer has one link to each owner it writes to: a TCP connection for what is small and a
process group of those two for the bytes (`collective_link`, `collective_wire`). There is no default group and no world:
agents come and go, and a peer that dies or is replaced breaks its own links only.

A write is one-sided for the caller: the owner's end checks every target against its registered memory and receives
into it; DONE means that it acknowledged. Neighbouring descriptors travel as one run, several runs of a write are
gathered into one message and scattered by the owner.

The metadata carries host, port, a random token, the kind of device and the registered ranges. Strangers without the
token are dropped; so is a writer that names other memory, before a byte has moved.

The verbs never wait: dialling, group making and copying are the links' threads' work, and each wait there has a
deadline. NCCL is untried on hardware; it needs the two agents on different GPUs (`backends` without "nccl" makes them
use Gloo, with a copy through host memory at both ends).
"""

from __future__ import annotations

import atexit
import errno
import logging
import queue
import secrets
import socket
import time

import msgspec
import numpy as np
import torch.distributed as dist

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState
from kv_transfer.agents.collective_link import AgentMetadata, IncomingLink, OutgoingLink, Write
from kv_transfer.agents.collective_wire import Backend
from kv_transfer.agents.regions import RegionTable, locate

logger = logging.getLogger(__name__)

MAX_STRANGERS = 32  # connections that have not shown the token; more are closed
CLOSE_TIMEOUT_S = 1.0


def built_backends() -> frozenset[Backend]:
    """What this torch was built with. Raises ConfigError when it cannot make process groups at all."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("the collective transport needs a torch with torch.distributed and Gloo")
    return frozenset({"gloo", "nccl"} if dist.is_nccl_available() else {"gloo"})


class CollectiveAgent:
    def __init__(self, name: str, host: str = "127.0.0.1", backends: frozenset[Backend] | None = None):
        """`host` is the address that peers dial, and the only one that this agent listens on."""
        self.name = name
        self._backends = built_backends() if backends is None else backends
        self._token = secrets.token_bytes(32)
        self._host = host
        self._listener = socket.create_server((self._host, 0), backlog=128)
        self._listener.setblocking(False)
        self._table = RegionTable()
        self._peers: dict[str, tuple[bytes, OutgoingLink]] = {}  # with the metadata it was made from
        self._writers: list[IncomingLink] = []
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._handles: dict[int, Write] = {}
        self._is_closed = False
        atexit.register(
            self.close
        )  # a thread inside torch while the interpreter goes would end the process hard

    def register(self, memory: BlockMemory) -> None:
        self._table.register(memory)

    def metadata(self) -> bytes:
        port = self._listener.getsockname()[1]
        kind = self._table.device.type
        return msgspec.msgpack.encode(
            AgentMetadata(self.name, self._host, port, self._token, kind, self._table.regions)
        )

    def connect(self, metadata: bytes) -> str:
        try:
            owner = msgspec.msgpack.decode(metadata, type=AgentMetadata)
        except msgspec.MsgspecError as error:
            raise TransferError(f"agent metadata cannot be read: {error}") from error
        known = self._peers.get(owner.name)
        if known is not None and known[0] == metadata and known[1].error is None:
            return owner.name
        if self._is_closed:
            raise TransferError(f"agent {self.name} is closed")
        self._drop_link(owner.name)
        on_devices = owner.device == self._table.device.type == "cuda"
        backend: Backend = "nccl" if on_devices and "nccl" in self._backends else "gloo"
        logger.info("agent %s writes to %s over %s", self.name, owner.name, backend)
        self._peers[owner.name] = (metadata, OutgoingLink(self.name, owner, backend, self._table))
        return owner.name

    def post(self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b"") -> Write:
        if local.shape != remote.shape or not (local[:, 1] == remote[:, 1]).all():
            raise TransferError("local and remote descriptors have different sizes")
        link = self._link(peer)
        locate(remote, link.owner.regions)
        write = link.post(self._table.runs(local), remote, notification)
        self._handles[id(write)] = write
        return write

    def poll(self, handle: Write) -> TransferState:
        return handle.link.poll(handle)

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

    def release(self, handle: Write) -> None:
        self._handles.pop(id(handle), None)
        handle.link.cancel(handle)

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
        self._handles.clear()
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
        """Take in who has dialled, forget who has left."""
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
                    logger.error("agent %s can accept nobody: %s", self.name, error)
                return
            if sum(writer.peer is None for writer in self._writers) >= MAX_STRANGERS:
                logger.warning("too many strangers dial; %s is turned away", address)
                connection.close()
                continue
            self._writers.append(
                IncomingLink(connection, self._token, self._backends, self._table, self._inbox.put)
            )
