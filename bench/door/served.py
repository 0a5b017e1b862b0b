"""A door alone in its process, on uvicorn and, as a replica of Ray's, on uvloop: `python -m bench.door.served
MEMBER`, with the member as JSON. Prints its port when it listens. Ends with its standard input, or is
killed."""

from __future__ import annotations

import asyncio
import gc
import os
import sys

import msgspec
import uvicorn
import uvloop

from bench import DEMO_MODEL
from cluster.config.settings import ClusterArgs
from cluster.types.members import Member
from router.api.app import build_api
from router.door import Door


async def _call_decode(replica_id: str, request_id: str) -> None:
    """Ray Serve's part, which only counts requests."""


async def main(member: Member) -> None:
    fields = {
        "model": str(DEMO_MODEL), "model_id": "demo", "dtype": "float32",
        "door": {"admission": {"max_outstanding_s": 1e6, "max_queued": 10_000}},
    }  # fmt: skip
    door = Door(ClusterArgs.model_validate(fields), _call_decode)
    config = uvicorn.Config(build_api(door), "127.0.0.1", 0, log_level="warning", backlog=2048)
    server = uvicorn.Server(config)
    _ = asyncio.ensure_future(server.serve())
    door.update_members(member.role, [member])
    while not (server.started and door.peers):
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()  # as a replica does
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=Member)))
