"""The adapter between Serve and the door: one HTTP replica.

Serve builds it on the replica's event loop:

1. `__init__` makes the door and subscribes it to the pools' membership.
2. `__serve_build_asgi_app__` gives Serve the HTTP application. The class decorator must stay at module level.
3. `__del__` closes the door.

HTTP goes straight to the application. Per request, only `_call_decode` passes through this class.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config.settings import ClusterArgs
from cluster.errors import UnavailableError
from cluster.types.members import Member, Role
from deploy.serving import ray_internals
from deploy.serving.exposure import bind_to_node_address
from deploy.serving.membership import MEMBERSHIP

logger = logging.getLogger(__name__)


def take_freed_port() -> None:
    """`reuse_freed_port`. Without it the successor of a door could not have the door's port, and Serve would
    never give that port away again. Call it while Serve builds the replica, because Serve starts the server
    afterwards."""
    try:
        ray_internals.reuse_freed_port()
    except ray_internals.RayChanged as error:
        logger.warning("a door cannot take the port of one that has just ended: %s", error)


@serve.ingress()
class DoorReplica:
    async def __init__(self, args: ClusterArgs, door: str, api: str, pools: dict[str, DeploymentHandle]):
        """`pools`: handles of all worker pools, by role. `door` and `api` are import paths."""
        from deploy.serving.gauges import DoorGauges
        from deploy.serving.held_check import HeldCheck
        from deploy.serving.replicas import freeze_what_is_loaded, load

        bind_to_node_address()
        take_freed_port()
        self._pools = {Role(name): ray_internals.by_value(handle) for name, handle in pools.items()}
        self._role_of: dict[str, Role] = {}  # of each replica that generates answers
        self._held_check, self._gauges = HeldCheck(), DoorGauges()
        door_class = load(door)
        self._door: Any = await asyncio.to_thread(door_class, args, self._call_decode)
        self._api = load(api)(self._door, tells_request_id=False)  # Serve's server adds it to every answer
        freeze_what_is_loaded()
        self._unsubscribe = MEMBERSHIP.subscribe(self._update_members)
        for handle in self._pools.values():
            ray_internals.start_membership_push(handle)

    def __serve_build_asgi_app__(self) -> Any:
        return self._api

    async def check_health(self) -> None:
        await self._held_check.hold()
        self._gauges.set(self._door.num_running, self._door.num_waiting)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it once a second if the deployment has an `autoscaling_config`."""
        from deploy.serving.scaling import door_stats

        return door_stats(*self._door.scaling_report())

    def _update_members(self, role: Role, members: list[Member]) -> None:
        if role.decodes:
            known = {replica_id: own for replica_id, own in self._role_of.items() if own is not role}
            self._role_of = known | {member.replica_id: role for member in members}
        self._door.update_members(role, members)

    async def _call_decode(self, replica_id: str, request_id: str) -> None:
        if (role := self._role_of.get(replica_id)) is None:
            raise UnavailableError(f"replica {replica_id} is gone")
        await self._pools[role].options(session_id=replica_id).run.remote(request_id)

    async def __del__(self) -> None:
        door = getattr(self, "_door", None)
        if door is not None:
            self._unsubscribe()
            await door.aclose()
