"""NIXL's API and bindings over a simulated GPU's memory. They refuse what NIXL over UCX refuses: descriptors
outside of registered memory, of another kind or another device; memory that is registered twice; memory that
is deregistered while a transfer reads or writes it. A transfer is under way for some polls and moves its
bytes at the end, also if it is released before: UCX cannot cancel a write."""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fakes.cuda_device import VRAM

NUM_POLLS = 3


class nixlInvalidParamError(Exception):
    pass


class nixlNotFoundError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


BINDINGS = SimpleNamespace(
    nixlInvalidParamError=nixlInvalidParamError, nixlNotFoundError=nixlNotFoundError,
    nixlRemoteDisconnectError=nixlRemoteDisconnectError,
)  # fmt: skip
Region = tuple[int, int, int, str]  # address, bytes, device, kind


@dataclass
class Descriptors:
    rows: np.ndarray  # [n, 3] address, bytes, device
    kind: str


@dataclass
class Transfer:
    local: Descriptors
    remote: Descriptors
    owner: StrictNixl
    notification: bytes
    sender: StrictNixl
    polls_left: int = NUM_POLLS
    is_released: bool = False

    @property
    def is_open(self) -> bool:
        return self.polls_left > 0 and not self.is_released

    def release(self) -> None:
        self.is_released = True

    def advance(self) -> None:
        if self.polls_left:
            self.polls_left -= 1
            if self.polls_left == 0:
                self.finish()

    def finish(self) -> None:
        for (source, size, _), (target, _, _) in zip(
            self.local.rows.tolist(), self.remote.rows.tolist(), strict=True
        ):
            ctypes.memmove(_held(target), _held(source), size)
        if self.notification:
            self.owner.inbox[self.sender.name].append(self.notification)


def _held(address: int) -> int:
    return address - VRAM if address >= VRAM else address


@dataclass
class StrictNixl:
    """`nixl_agent`, of one process with `num_devices` GPUs."""

    name: str
    config: Any = None
    num_devices: int = 2
    regions: list[Region] = field(default_factory=list)
    peers: dict[str, tuple[StrictNixl, list[Region]]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    inbox: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        AGENTS[self.name] = self

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def create_backend(self, backend: str, init_params: dict[str, str]) -> None:
        pass

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> list[Region]:
        made = []
        for address, size, device, _ in reg_list:
            if (address >= VRAM) != (mem_type == "VRAM") or device >= self.num_devices:
                raise nixlInvalidParamError(f"{mem_type} on device {device} is not at {address:#x}")
            if any(
                address < start + length and start < address + size for start, length, _, _ in self.regions
            ):
                raise nixlInvalidParamError(f"{address:#x} is registered")
            made.append((address, size, device, mem_type))
        self.regions += made
        return made

    def deregister_memory(self, dereg_list: list[Region]) -> None:
        for region in dereg_list:
            for transfer in (each for agent in AGENTS.values() for each in agent.transfers if each.is_open):
                mine = (
                    transfer.local
                    if transfer.sender is self
                    else transfer.remote
                    if transfer.owner is self
                    else None
                )
                if mine is not None and any(_inside(row, [region]) for row in mine.rows.tolist()):
                    raise nixlInvalidParamError("a transfer is under way in this memory")
            self.regions.remove(region)

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, self.regions]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, regions = json.loads(metadata)
        self.peers[name] = (AGENTS[name], [tuple(region) for region in regions])
        return name

    def remove_remote_agent(self, agent: str) -> None:
        self.peers.pop(agent)

    def get_xfer_descs(self, descs: np.ndarray, mem_type: str) -> Descriptors:
        return Descriptors(descs, mem_type)

    def initialize_xfer(
        self, operation: str, local_descs: Descriptors, remote_descs: Descriptors, remote_agent: str,
        notif_msg: bytes,
    ) -> Transfer:  # fmt: skip
        if remote_agent not in self.peers:
            raise nixlNotFoundError(remote_agent)
        owner, known = self.peers[remote_agent]
        for descs, regions in ((local_descs, self.regions), (remote_descs, known)):
            wanted = [region for region in regions if region[3] == descs.kind]
            if not all(_inside(row, wanted) for row in descs.rows.tolist()):
                raise nixlNotFoundError("no registered memory of this kind and device holds a descriptor")
        if not (local_descs.rows[:, 1] == remote_descs.rows[:, 1]).all():
            raise nixlInvalidParamError("descriptors of different sizes")
        made = Transfer(local_descs, remote_descs, owner, notif_msg, self)
        self.transfers.append(made)
        return made

    def transfer(self, handle: Transfer) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Transfer) -> str:
        handle.advance()
        return "PROC" if handle.polls_left else "DONE"

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self.peers[remote_agent_name][0].inbox[self.name].append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        for transfer in self.transfers:
            if transfer.is_released:
                transfer.advance()
        taken, self.inbox = dict(self.inbox), defaultdict(list)
        return taken


AGENTS: dict[str, StrictNixl] = {}
API = SimpleNamespace(nixl_agent=StrictNixl, nixl_agent_config=lambda **_: None)


def _inside(row: list[int], regions: list[Region]) -> bool:
    address, size, device = row
    return any(
        start <= address and address + size <= start + length and device == index
        for start, length, index, _ in regions
    )
