"""NIXL over UCX: shared memory on one host, TCP, CUDA IPC, RDMA. The only file that imports nixl.

Settings. The progress thread is off, because it spins a whole core; so both sides must call `notifications`
while anything is open. On one host a write of CPU memory is a cross-process copy that runs inside `post`.
UCX's error handling stays at "peer", its default: the kill of a peer becomes an error within a second or two.

Network devices. UCX listens on TCP as soon as an agent is made. A peer that connects there may write anywhere
in the process: UCX has no authentication. So an agent uses the network devices that its owner names, or
loopback alone if it names none. On one host, TCP over loopback carries notifications and detects a peer's
death; the bytes go by CMA or CUDA IPC.

Metadata. What peers exchange wraps NIXL's own metadata with the list of registered ranges: a grant names
addresses only, and NIXL needs to know of each whether it is DRAM or VRAM and on which device.

Transports. UCX does not report which of its transports it took for a peer, but the first writes show it: only
the copy between processes of one host (CMA) is over when the call returns. The log names the transport once.
On one host any other transport is a warning, because it is several times slower (containers and hardened
kernels forbid that copy). A write after a notification shows nothing: it is over when the peer has read the
notification.

An agent belongs to one thread at a time; it may be made and registered on one thread and used on another.
"""

from __future__ import annotations

import importlib
import logging
import logging.config
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from cluster.config.environment import tell_net_devices
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState, before_posting

logger = logging.getLogger(__name__)

NUM_LATE_WRITES = 8  # CMA, too, sometimes returns early: so many writes in a row mean another transport
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one per running kernel, whatever the container
_STATES = {"DONE": TransferState.DONE, "PROC": TransferState.PENDING, "ERR": TransferState.FAILED}


class NixlRegion(msgspec.Struct, frozen=True, array_like=True):
    address: int
    num_bytes: int
    kind: str  # "DRAM" or "VRAM"
    device_id: int


class NixlMetadata(msgspec.Struct, frozen=True, array_like=True):
    name: str
    regions: tuple[NixlRegion, ...]
    nixl: bytes
    boot_id: str  # equal on one host; for the log only


@dataclass
class NixlPeer:
    metadata: bytes
    regions: tuple[NixlRegion, ...]
    is_on_this_host: bool
    num_late_writes: int = -1  # not over in the call; -1 until the connection is made
    is_transport_known: bool = False
    has_notified: bool = False  # since the last write was over


@dataclass
class NixlWrite:
    nixl: Any
    peer: str
    state: TransferState


def load_nixl() -> tuple[ModuleType, ModuleType]:
    """(nixl's API, its bindings), from the wheel that is installed. Raises ConfigError if none is."""
    cuda_first = ("cu13", "cu12") if (torch.version.cuda or "").startswith("13") else ("cu12", "cu13")
    names = [f"nixl_{cuda}" for cuda in cuda_first] + ["nixl"]
    failures: list[str] = []
    for name in names:
        try:
            with keeping_log_handlers():
                return importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            failures.append(f"{name}: {error}")
    reasons = "; ".join(failures)
    raise ConfigError(
        f"the NIXL transport needs the package nixl-cu12 or nixl-cu13; none can be imported ({reasons})"
    )


@contextmanager
def keeping_log_handlers() -> Iterator[None]:
    """NIXL configures Python's logging when it is imported, and `dictConfig` closes every handler of the
    process. Serve then loses a replica's log, and after a restart of its controller it takes the replica for
    broken and replaces it. Inside, `dictConfig` does nothing."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises


class NixlAgent:
    def __init__(self, name: str, net_devices: Sequence[str] = ("lo",)):
        """`name`: never used by another process, for example a replica's incarnation id. `net_devices`: those
        that UCX may use, by its names. Takes about half a second. Raises ConfigError if NIXL or a device is
        missing.
        """
        api, self._bindings = load_nixl()
        self.name = name
        tell_net_devices(net_devices)
        with self._mapped():
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._nixl: Any | None = api.nixl_agent(name, config)  # None: closed
        if "UCX" not in self._agent.get_plugin_list():
            raise ConfigError("this NIXL has no UCX plugin")
        try:
            with self._mapped():
                self._agent.create_backend("UCX", {})
        except TransferError as error:
            raise ConfigError(
                f"NIXL cannot use the network devices {', '.join(net_devices)}: {error}",
                param="transfer.net_devices",
            ) from error
        self._regions: list[NixlRegion] = []
        # A memory stays alive while it is registered.
        self._registrations: list[tuple[BlockMemory, Any]] = []
        self._boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        self._metadata = b""
        self._peers: dict[str, NixlPeer] = {}
        self._handles: dict[int, NixlWrite] = {}

    @property
    def _agent(self) -> Any:
        if self._nixl is None:
            raise TransferError(f"agent {self.name} is closed")
        return self._nixl

    def register(self, memory: BlockMemory) -> None:
        if any(known is memory for known, _ in self._registrations):
            return
        device = memory.buffer.device
        kind = "VRAM" if device.type == "cuda" else "DRAM"
        region = NixlRegion(memory.base_address, memory.buffer.numel(), kind, device.index or 0)
        with self._mapped():
            registration = self._agent.register_memory(
                [(region.address, region.num_bytes, region.device_id, "")], mem_type=kind
            )
            self._registrations.append((memory, registration))
            self._regions.append(region)
            encoded = NixlMetadata(
                self.name, tuple(self._regions), self._agent.get_agent_metadata(), self._boot_id
            )
        self._metadata = msgspec.msgpack.encode(encoded)

    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes) -> str:
        try:
            decoded = msgspec.msgpack.decode(metadata, type=NixlMetadata)
        except msgspec.MsgspecError as error:
            raise TransferError(f"agent metadata cannot be read: {error}") from error
        known = self._peers.get(decoded.name)
        if known is not None and known.metadata == metadata:
            return decoded.name
        self.disconnect(decoded.name)
        with self._mapped():
            added = self._agent.add_remote_agent(decoded.nixl)
        added = added.decode() if isinstance(added, bytes) else added
        if added != decoded.name:
            raise TransferError(f"metadata of {decoded.name} belongs to {added}")
        self._peers[decoded.name] = NixlPeer(
            metadata, decoded.regions, is_on_this_host=decoded.boot_id == self._boot_id != ""
        )
        return decoded.name

    def post(self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b"") -> NixlWrite:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"peer {peer} is not connected")
        with before_posting(), self._mapped():
            local_descs = self._descriptors(local, tuple(self._regions), self.name)
            remote_descs = self._descriptors(remote, known.regions, peer)
            transfer = self._agent.initialize_xfer("WRITE", local_descs, remote_descs, peer, notification)
        with self._mapped():
            try:
                state = _STATES[self._agent.transfer(transfer)]
            except BaseException:
                self._forget(transfer)
                raise
        if not known.is_transport_known and (state is TransferState.DONE or not known.has_notified):
            self._watch_transport(peer, known, state)
        handle = NixlWrite(transfer, peer, state)
        self._handles[id(handle)] = handle
        return handle

    def poll(self, handle: NixlWrite) -> TransferState:
        if handle.state is TransferState.PENDING:
            try:
                with self._mapped():
                    handle.state = _STATES[self._agent.check_xfer_state(handle.nixl)]
            except TransferError:
                handle.state = TransferState.FAILED
                raise
            known = self._peers.get(handle.peer)
            if handle.state is TransferState.DONE and known is not None:
                known.num_late_writes = max(known.num_late_writes, 0)
                known.has_notified = False
        return handle.state

    def ended_at(self, handle: NixlWrite) -> None:
        """NIXL's telemetry, too, counts a write's duration until it is polled (tried with 1.5)."""
        return None

    def notify(self, peer: str, payload: bytes) -> None:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"peer {peer} is not connected")
        known.has_notified = True
        with self._mapped():
            self._agent.send_notif(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        with self._mapped():
            by_peer = self._agent.get_new_notifs()
        return [(peer, payload) for peer, payloads in by_peer.items() for payload in payloads]

    def release(self, handle: NixlWrite) -> None:
        """NIXL itself would say yes to a write in flight, but UCX cannot cancel one: it goes on reading the
        source and writing the target (NIXL's issue 2067)."""
        with suppress(TransferError):
            self.poll(handle)
        if handle.state is TransferState.PENDING:
            raise TransferError(f"a write to {handle.peer} is in flight and cannot be cancelled")
        if self._handles.pop(id(handle), None) is not None:
            self._forget(handle.nixl)

    def disconnect(self, peer: str) -> None:
        if self._peers.pop(peer, None) is None:
            return
        for handle in [h for h in self._handles.values() if h.peer == peer]:
            with suppress(TransferError):
                self.poll(handle)
            if handle.state is TransferState.PENDING:
                handle.state = TransferState.FAILED
        with suppress(TransferError), self._mapped():  # already gone
            self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        if self._nixl is None:
            return
        for handle in list(self._handles.values()):
            self._forget(handle.nixl)
        self._handles.clear()
        for peer in list(self._peers):
            self.disconnect(peer)
        for _, registration in self._registrations:
            with self._mapped():
                self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._nixl = None

    def _watch_transport(self, peer: str, known: NixlPeer, state: TransferState) -> None:
        """Finds out from the state that a post returned how bytes travel to this peer, and logs it once."""
        if state is TransferState.DONE:
            known.is_transport_known = True
            logger.info("agent %s: writes to %s are copies between processes of this host", self.name, peer)
        elif known.num_late_writes >= 0:
            known.num_late_writes += 1
            known.is_transport_known = known.num_late_writes == NUM_LATE_WRITES
            if known.is_transport_known and known.is_on_this_host and self._regions[0].kind == "DRAM":
                logger.warning(
                    "agent %s: writes to %s, on this host, do not use the copy between processes (CMA); "
                    "UCX_TLS or missing permissions forbid it, and the transport in use is several times slower",
                    self.name,
                    peer,
                )
            elif known.is_transport_known:
                logger.info("agent %s: writes to %s travel by a network or device transport", self.name, peer)

    def _forget(self, transfer: Any) -> None:
        """Release, ignoring errors: NIXL's own finaliser tries again."""
        with suppress(TransferError), self._mapped():
            transfer.release()

    def _descriptors(self, rows: np.ndarray, regions: tuple[NixlRegion, ...], owner: str) -> Any:
        """NIXL's descriptor list (address, bytes, device) of rows that all lie in one registered range."""
        start, end = int(rows[:, 0].min()), int((rows[:, 0] + rows[:, 1]).max())
        for region in regions:
            if region.address <= start and end <= region.address + region.num_bytes:
                table = np.empty((len(rows), 3), dtype=np.uint64)
                table[:, :2] = rows
                table[:, 2] = region.device_id
                return self._agent.get_xfer_descs(table, mem_type=region.kind)
        raise TransferError(f"agent {owner} has no registered memory at [{start:#x}, {end:#x})")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Turns NIXL's exceptions into ours."""
        try:
            yield
        except self._bindings.nixlRemoteDisconnectError as error:
            raise PeerLostError(f"NIXL: the peer is gone ({error})") from error
        except _nixl_errors(self._bindings) as error:
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error


def _nixl_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    return tuple(
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and name.endswith("Error") and isinstance(value, type)
    )
