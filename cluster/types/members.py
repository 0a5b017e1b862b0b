"""The workers of the cluster, as every door sees them."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What workers do of a request. The fourth phase, generate, is the door's."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Role(StrEnum):
    """What a worker is for. Code that asks what a worker can do asks for its phases, not for its role."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    LANGUAGE = "language"  # prefill and decode
    ENCODE_PREFILL = "encode_prefill"
    WHOLE = "whole"  # all three

    @property
    def deployment(self) -> str:
        """The name of its Serve deployment."""
        return self.value.title().replace("_", "")

    @property
    def phases(self) -> frozenset[Phase]:
        return _PHASES[self]

    @property
    def encodes(self) -> bool:
        """Turns media items into embeddings."""
        return Phase.ENCODE in self.phases

    @property
    def prefills(self) -> bool:
        """Computes prompts for any worker that decodes, and sends it their KV."""
        return Phase.PREFILL in self.phases

    @property
    def decodes(self) -> bool:
        """Generates answers. It may compute the prompts of these itself, also if it does not prefill."""
        return Phase.DECODE in self.phases


_PHASES = {
    Role.ENCODE: frozenset((Phase.ENCODE,)),
    Role.PREFILL: frozenset((Phase.PREFILL,)),
    Role.DECODE: frozenset((Phase.DECODE,)),
    Role.LANGUAGE: frozenset((Phase.PREFILL, Phase.DECODE)),
    Role.ENCODE_PREFILL: frozenset((Phase.ENCODE, Phase.PREFILL)),
    Role.WHOLE: frozenset(Phase),
}


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process, distinguished from all others that ever run; see `kv_transfer.lease.processes`."""

    boot_id: str  # identifies one boot of the host's kernel
    namespace: int  # the pid namespace
    pid: int
    started_at: int  # clock ticks after the kernel's start, because pids are reused


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One live replica. Published once, when the replica becomes ready; constant for one incarnation."""

    replica_id: str
    role: Role
    address: str  # side channel: "unix:/path" or "tcp:host:port"
    model: str  # fingerprint of the model's configuration and dtype, without its weights
    layout: str  # fingerprint of the KV layout; of a worker that only encodes: of the feature layout
    num_blocks: int  # capacity of that memory
    modalities: tuple[str, ...] = ()  # of a worker that encodes
    hardware: str = ""  # undisturbed workers of one role with equal hardware are equally fast
    block_bytes: int = 0  # of a block of KV
    state_blocks: int = 0  # of KV, for a sequence's state; 0: the model keeps none
    num_layers: int = 1  # of the model; not encode
    # of all its ranks: the processes that write into other workers' memory
    processes: tuple[ProcessId, ...] = ()
    row_bytes: int = 0  # of an embedding row; of a worker that encodes
    device: str = ""  # workers with the same one take turns on it, step by step; empty: it has one alone
    process_name: str = ""  # `Hello.name` of the worker; empty: any process at the address is this member
