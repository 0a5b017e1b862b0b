"""What the fetcher gives and refuses, against a host on loopback that the operator trusts."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import os
import time

import pytest

from cluster import overload
from cluster.errors import MediaError, OverloadedError
from cluster.media.fetch import Fetcher, FetchPolicy
from tests.contract.fetch_host import Request, answer, redirect
from tests.contract.fetching import MEBIBYTE, drip_body, dripping, fetcher_of, read
from tests.fakes.clock import ManualClock


async def test_the_bytes_and_their_digest_come_back(host, fetcher):
    host.handlers["/a.png?sig=%2F%2b"] = answer(b"pixels")
    media = await read(fetcher, host.url("/a.png?sig=%2F%2b#part"))
    assert (media.data, media.digest) == (b"pixels", hashlib.sha256(b"pixels").digest())
    assert host.requests[0].path == "/a.png?sig=%2F%2b"


async def test_a_request_carries_no_more_than_it_needs(host, fetcher):
    host.handlers["/a"] = answer(b"pixels", set_cookie="session=1; Path=/")
    await read(fetcher, host.url("/a"))
    await read(fetcher, host.url("/a"))
    assert len(host.requests) == 2
    for request in host.requests:
        assert set(request.headers) == {"host", "accept", "accept-encoding", "user-agent"}
        assert request.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("num_bytes", [1, 1000, 196_607, 196_608, 196_609, 1_000_000])
async def test_data_uris_of_any_size_are_read(fetcher, num_bytes):
    data = os.urandom(num_bytes)
    media = await read(fetcher, "DATA:image/png;base64," + base64.b64encode(data).decode())
    assert (media.data, media.digest) == (data, hashlib.sha256(data).digest())


@pytest.mark.parametrize("position", [2**18 - 4, 2**18, 2**19 - 1])
@pytest.mark.parametrize("spoilt", ["=", "*", " ", "\n"])
async def test_a_long_data_uri_is_refused_wherever_it_is_broken(fetcher, spoilt, position):
    text = "A" * 2**20
    url = f"data:image/png;base64,{text[:position]}{spoilt}{text[position + 1 :]}"
    with pytest.raises(MediaError, match="the data is not valid base64"):
        await read(fetcher, url)


@pytest.mark.parametrize("padded", ["AA==", "AAA="])
async def test_padding_is_allowed_at_the_end_alone(fetcher, padded):
    head = "data:image/png;base64," + "A" * (2**18 - 4)
    assert len((await read(fetcher, head + padded)).data) == 2**18 // 4 * 3 - padded.count("=")
    with pytest.raises(MediaError, match="the data is not valid base64"):
        await read(fetcher, head + padded + "AAAA")


async def test_bad_data_uris_name_the_item(fetcher):
    with pytest.raises(MediaError, match=r"item 2 \(image\): a data URI must be base64") as caught:
        await read(fetcher, "data:image/png,abc")
    assert caught.value.param == "messages.0"


async def test_errors_name_the_item_and_its_field_but_nothing_of_the_url(host, fetcher):
    with pytest.raises(MediaError, match=r"^item 2 \(image\): the host answered with status 404$") as caught:
        await read(fetcher, host.url("/secret?token=secret"))
    assert (caught.value.param, caught.value.status) == ("messages.0", 400)


@pytest.mark.parametrize("status", ["201 Created", "204 No Content", "206 Partial Content", "304 Not Modified",
                                    "401 Unauthorized", "500 Oops", "101 Switching Protocols"])  # fmt: skip
async def test_every_other_status_is_refused(host, fetcher, status):
    host.handlers["/a"] = answer(b"x" if status[:3] not in ("204", "304", "101") else b"", status)
    with pytest.raises(MediaError, match=f"status {status[:3]}"):
        await read(fetcher, host.url("/a"))


async def test_redirects_are_followed_up_to_the_limit(host, fetcher):
    for hop in range(4):
        host.handlers[f"/{hop}"] = redirect(f"/{hop + 1}" if hop % 2 else f"http://{host.at}/{hop + 1}")
    host.handlers["/4"] = answer(b"pixels")
    assert (await read(fetcher, host.url("/1"))).data == b"pixels"
    with pytest.raises(MediaError, match="more than 3 redirects"):
        await read(fetcher, host.url("/0"))


async def test_a_redirect_to_itself_ends(host, fetcher):
    host.handlers["/a"] = redirect("/a", "308 Permanent Redirect")
    with pytest.raises(MediaError, match="more than 3 redirects"):
        await read(fetcher, host.url("/a"))
    assert len(host.requests) == 4


async def test_a_declared_length_beyond_the_cap_is_refused_before_the_body(host, fetcher):
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n")

    host.handlers["/a"] = handle
    with pytest.raises(MediaError, match="larger than 1000 bytes"):
        await read(fetcher, host.url("/a"), 1000)


async def test_the_cap_itself_is_allowed(host, fetcher):
    host.handlers["/a"] = answer(b"x" * 1000)
    assert len((await read(fetcher, host.url("/a"), 1000)).data) == 1000
    with pytest.raises(MediaError, match="larger than 999 bytes"):
        await read(fetcher, host.url("/a"), 999)


async def test_a_body_without_end_is_stopped_at_the_cap(host, fetcher):
    num_sent = 0

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()
            num_sent += 0x10000

    host.handlers["/a"] = handle
    with pytest.raises(MediaError, match="larger than 1048576 bytes"):
        await read(fetcher, host.url("/a"))
    await host.until_closed()
    assert num_sent < 16 * MEBIBYTE  # the cap, and what the sockets' buffers took meanwhile


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "x-unknown", "identity, gzip"])
async def test_compressed_answers_are_refused(host, fetcher, encoding):
    host.handlers["/a"] = answer(b"\x1f\x8b", content_encoding=encoding)
    with pytest.raises(MediaError, match="compressed"):
        await read(fetcher, host.url("/a"))


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nsho",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nsixsix",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"not http at all\r\n\r\n",
        b"",
    ],
    ids=["short", "cut chunk", "bad chunk", "negative", "two lengths", "long field", "many fields", "no HTTP", "silence"],
)  # fmt: skip
async def test_broken_answers_are_refused(host, fetcher, head):
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        writer.write_eof()

    host.handlers["/a"] = handle
    with pytest.raises(MediaError, match=r"item 2 \(image\): the host's answer is broken or ended early"):
        await read(fetcher, host.url("/a"))


async def test_an_empty_body_is_refused(host, fetcher):
    host.handlers["/a"] = answer(b"")
    with pytest.raises(MediaError, match="empty"):
        await read(fetcher, host.url("/a"))


drip_head = dripping(b"HTTP/1.1 200 OK\r\n", b"X-Y: z\r\n")
continue_for_ever = dripping(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n")


@pytest.mark.parametrize("handler", [drip_body, drip_head, continue_for_ever])
async def test_what_drips_is_cut_at_the_deadline(host, handler):
    host.handlers["/a"] = handler
    fetcher = fetcher_of(host, total_timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(MediaError, match=r"not received within 0\.3 s"):
        await read(fetcher, host.url("/a"))
    assert time.monotonic() - started > 0.25
    await host.until_closed()
    await fetcher.aclose()


async def test_redirects_share_one_deadline(host):
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.15)
        await redirect("/a")(request, writer)

    host.handlers["/a"] = handle
    fetcher = fetcher_of(host, total_timeout_s=0.3, max_redirects=100)
    with pytest.raises(MediaError, match="not received within"):
        await read(fetcher, host.url("/a"))
    assert len(host.requests) <= 3
    await fetcher.aclose()


async def test_a_request_that_gets_no_slot_is_told_to_come_again(host):
    paths = [f"/{idx}" for idx in range(20)]
    host.handlers |= dict.fromkeys(paths, drip_body)
    fetcher = fetcher_of(host, total_timeout_s=0.3, max_concurrent=1)
    errors = await asyncio.gather(*(read(fetcher, host.url(path)) for path in paths), return_exceptions=True)
    # A slot that is free at its holder's deadline may serve the next request for the last moment of its own.
    refused = {error.message for error in errors if isinstance(error, OverloadedError)}
    assert refused == {overload.no_slot("downloads of media", 0.3, 1, 1)}
    assert all(isinstance(error, MediaError | OverloadedError) for error in errors)
    await fetcher.aclose()


async def test_hosts_that_hang_keep_no_other_tenant_from_its_media(host):
    paths = [f"/{idx}" for idx in range(12)]
    host.handlers |= dict.fromkeys(paths, drip_body) | {"/other": answer(b"pixels")}
    fetcher = fetcher_of(host, max_concurrent=4)
    hanging = [asyncio.create_task(read(fetcher, host.url(path), tenant="a")) for path in paths]
    async with asyncio.timeout(60):
        while len(host.requests) < 3:
            await asyncio.sleep(0.005)
    for _ in range(5):
        assert (await read(fetcher, host.url("/other"), tenant="b")).data == b"pixels"
    assert sum(request.path != "/other" for request in host.requests) == 3, "three of four slots"
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)
    await fetcher.aclose()


async def test_a_refused_connection_is_unreachable(fetcher, host):
    await host.__aexit__()
    with pytest.raises(MediaError, match=r"item 2 \(image\): the host cannot be reached$"):
        await read(fetcher, host.url("/a"))


async def test_a_name_that_does_not_resolve_is_unreachable_and_a_slow_one_too_late():
    async def lookup(name: str) -> list[str]:
        if name == "slow.test":
            await asyncio.sleep(60)
        raise OSError("secret detail 10.0.0.1")

    fetcher = Fetcher(FetchPolicy(connect_timeout_s=0.1), ManualClock(), lookup=lookup)
    with pytest.raises(MediaError, match=r"the host cannot be reached$"):
        await read(fetcher, "https://gone.test/a")
    with pytest.raises(MediaError, match=r"the host did not answer in time$"):
        await read(fetcher, "https://slow.test/a")
    await fetcher.aclose()


async def test_a_host_that_never_speaks_tls_is_given_up_in_time(host):
    fetcher = fetcher_of(host, connect_timeout_s=0.2)
    with pytest.raises(MediaError, match=r"the host did not answer in time$"):
        await read(fetcher, host.url("/a", scheme="https"))
    await host.until_closed()
    await fetcher.aclose()


async def test_no_file_is_left_open(host):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    fetcher = fetcher_of(host, total_timeout_s=0.2)
    host.handlers |= {"/a": answer(b"pixels"), "/drip": drip_body, "/away": redirect("/a")}
    paths = ("/a", "/away", "/missing", "/drip") * 5
    await asyncio.gather(
        *(read(fetcher, host.url(path), tenant=str(idx)) for idx, path in enumerate(paths)),
        return_exceptions=True,
    )
    await fetcher.aclose()
    await host.until_closed()
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
