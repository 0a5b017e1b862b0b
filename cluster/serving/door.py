"""The adapter between Serve and the door: one HTTP replica.

Serve builds it on the replica's event loop:

1. `__init__` makes the door and subscribes it to the pools' membership.
2. `__serve_build_asgi_app__` gives Serve the HTTP application. The class decorator must stay at module level.
3. `__del__` closes the door.

HTTP goes straight to the application. Per request, only `_call_decode` passes through this class.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config.settings import ClusterArgs
from cluster.serving.exposure import bind_to_node_address
from cluster.serving.membership import MEMBERSHIP


@serve.ingress()
class DoorReplica:
    async def __init__(self, args: ClusterArgs, door: str, api: str, pools: list[DeploymentHandle]):
        """`pools`: handles of all worker pools, decode last. `door` and `api` are import paths."""
        from cluster.serving.replicas import freeze_what_is_loaded, load

        bind_to_node_address()
        self._decode = pools[-1].options(_by_reference=False)
        door_class = load(door)
        self._door: Any = await asyncio.to_thread(door_class, args, self._call_decode)
        self._api = load(api)(self._door)
        freeze_what_is_loaded()
        self._unsubscribe = MEMBERSHIP.subscribe(self._door.update_members)
        for handle in (*pools[:-1], self._decode):
            if not handle.is_initialized:
                handle._init()  # starts the membership push now instead of with the first call

    def __serve_build_asgi_app__(self) -> Any:
        return self._api

    async def _call_decode(self, replica_id: str, request_id: str) -> None:
        await self._decode.options(session_id=replica_id).run.remote(request_id)

    async def __del__(self) -> None:
        door = getattr(self, "_door", None)
        if door is not None:
            self._unsubscribe()
            await door.aclose()
