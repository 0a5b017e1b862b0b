"""What a door knows of the pools, as the JSON of `/pools`. Pure; costs nothing until it is asked for.

The numbers are those of each worker's last load report. `num_requests` is of this door alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.types.members import Role
from cluster.types.messages import LoadReport
from router.flow.state import WorkerState
from router.members import Peer


def pool_fields(
    roles: Iterable[Role], peers: Iterable[Peer], workers: Iterable[WorkerState], *, shows_workers: bool
) -> list[dict[str, Any]]:
    """One entry for each of `roles`, also if it has no worker now. Without `shows_workers` the workers of a
    pool are numbered in the order in which they joined."""
    states = {worker.replica_id: worker for worker in workers}
    members = list(peers)
    pools = []
    for role in roles:
        of_pool = [peer for peer in members if peer.member.role is role and peer.member.replica_id in states]
        pools.append(
            {
                "role": role.value,
                "workers": [
                    {
                        "name": peer.member.replica_id if shows_workers else f"{role.value} {number}",
                        **_worker_fields(peer, states[peer.member.replica_id]),
                    }
                    for number, peer in enumerate(of_pool, 1)
                ],
            }
        )
    return pools


def _worker_fields(peer: Peer, state: WorkerState) -> dict[str, Any]:
    loads = peer.loads.values()
    return {
        "is_listed": state.is_listed,
        "is_avoided": state.is_avoided,
        "num_requests": state.num_requests,
        "sent_bytes": sum(load.sent.raw_bytes + load.sent.coded_bytes for load in loads),
        "parts": [_part_fields(peer, part, load) for part, load in peer.loads.items()],
    }


def _part_fields(peer: Peer, part: Role, load: LoadReport) -> dict[str, Any]:
    """A worker has one part, or an encoder and the other phases."""
    role = peer.member.role
    return {
        "part": part.value,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_queued_units": load.num_queued_units,
        # Members tell the size of one memory: of KV, if the worker has any
        "num_blocks": peer.member.num_blocks if part is role else None,
        "num_used_blocks": load.num_used_blocks,
        "num_cached_blocks": load.num_cached_blocks,
        "num_encoded": load.encoded.num_encoded,
        "num_cached_items": load.encoded.num_cached,
    }
