"""The successor of a door in the same pod gets the door's port, where Prometheus reads it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import yaml
from ray.serve._private import constants, http_util, node_port_manager, replica
from ray.serve._private.common import RequestProtocol
from ray.serve.config import HTTPOptions

from cluster.config.settings import REPOSITORY
from deploy.serving.door import take_freed_port

ENVIRONMENT = yaml.safe_load((REPOSITORY / "deploy/chart/files/environment.yaml").read_text())
QUARANTINE_S = float(ENVIRONMENT["RAY_SERVE_PORT_QUARANTINE_S"])


@pytest.fixture(autouse=True)
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "start_asgi_http_server", http_util.start_asgi_http_server)
    for module in (constants, node_port_manager):
        monkeypatch.setattr(module, "RAY_SERVE_PORT_QUARANTINE_S", QUARANTINE_S)


def test_serve_gives_a_freed_port_away_at_once_on_the_chart():
    ports = node_port_manager.PortAllocator(30000, 31000, RequestProtocol.HTTP, "node")
    assert ports.allocate("old") == 30000
    ports.release("old", 30000)
    assert ports.allocate("new") == 30000


async def test_a_door_takes_a_port_whose_connections_have_just_ended():
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nothing is asked")

    async def open_and_close(port: int) -> int:
        """As Serve starts a door's server; the server closes the connection first. Returns the port."""
        options = HTTPOptions(host="127.0.0.1", port=port)
        task, server = await replica.start_asgi_http_server(
            answer, options, event_loop=loop, enable_so_reuseport=False
        )
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0)
            (listener,) = server.servers[0].sockets
            port = listener.getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            server.should_exit = True
            await reader.read()
            writer.close()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return port

    loop = asyncio.get_running_loop()
    with pytest.raises(RuntimeError, match="Failed to bind"):
        await open_and_close(await open_and_close(0))
    take_freed_port()
    freed = await open_and_close(0)
    assert await open_and_close(freed) == freed
