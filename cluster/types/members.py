"""Who is in the cluster, as every door sees it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process among all that ever run; see `kv_transfer.lease.processes`."""

    boot_id: str  # of the host's running kernel
    namespace: int  # in which the pid counts
    pid: int
    started_at: int  # clock ticks after the kernel's start: pids are used again


class Member(msgspec.Struct, frozen=True):
    """One live replica. Published once when it becomes ready; never changes for one incarnation."""

    replica_id: str
    role: Role
    address: str  # side channel: "unix:/path" or "tcp:host:port"
    model: str  # fingerprint of the model's configuration and dtype, not of its weights
    layout: str  # fingerprint of the KV layout (prefill, decode) or feature layout (encode)
    num_blocks: int  # capacity of the replica's block memory
    modalities: tuple[str, ...] = ()  # encode only
    hardware: str = ""  # workers of one role and an equal one are equally fast when nothing disturbs them
    block_bytes: int = 0  # of one block, with the KV (embeddings) of as many tokens (rows) as it holds
    num_layers: int = 1  # of the model; prefill and decode
    processes: tuple[ProcessId, ...] = ()  # of all its ranks: what writes to others' memories
