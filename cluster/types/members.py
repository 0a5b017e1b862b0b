"""The workers of the cluster, as every door sees them."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process, distinguished from all others that ever run; see `kv_transfer.lease.processes`."""

    boot_id: str  # identifies one boot of the host's kernel
    namespace: int  # the pid namespace
    pid: int
    started_at: int  # clock ticks after the kernel's start, because pids are reused


class Member(msgspec.Struct, frozen=True):
    """One live replica. Published once, when the replica becomes ready; constant for one incarnation."""

    replica_id: str
    role: Role
    address: str  # side channel: "unix:/path" or "tcp:host:port"
    model: str  # fingerprint of the model's configuration and dtype, without its weights
    layout: str  # fingerprint of the KV layout (prefill, decode) or feature layout (encode)
    num_blocks: int  # capacity of the replica's block memory
    modalities: tuple[str, ...] = ()  # encode only
    hardware: str = ""  # undisturbed workers of one role with equal hardware are equally fast
    block_bytes: int = 0  # bytes of one block: the KV of its tokens, or the embeddings of its rows
    num_layers: int = 1  # of the model; prefill and decode
    # of all its ranks: the processes that write into other workers' memory
    processes: tuple[ProcessId, ...] = ()
