"""Many callers of one URL: the host is asked once, and no caller disturbs another."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import MediaError, UnavailableError
from cluster.media.fetch.fetcher import FetchedMedia
from tests.contract.fetch_host import Request, answer
from tests.contract.fetching import drip_body, fetcher_of, read


def slow_answer(body: bytes, delay_s: float = 0.05):
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        await answer(body)(request, writer)

    return handle


async def test_fifty_callers_of_one_url_make_one_request(host, fetcher):
    host.handlers["/a"] = slow_answer(b"pixels")
    media = await asyncio.gather(*(read(fetcher, host.url("/a")) for _ in range(50)))
    assert len(host.requests) == 1
    assert {item.data for item in media} == {b"pixels"}


async def test_an_error_reaches_every_caller_under_its_own_name(host, fetcher):
    host.handlers["/a"] = slow_answer(b"")
    errors = await asyncio.gather(
        *(read(fetcher, host.url("/a"), item_idx=idx) for idx in range(5)), return_exceptions=True
    )
    assert [str(error) for error in errors] == [f"item {idx} (image): empty" for idx in range(5)]
    assert len(host.requests) == 1


async def test_tenants_do_not_share_a_download_or_a_kept_answer(host, fetcher):
    host.handlers["/a"] = answer(b"pixels", cache_control="max-age=60")
    for _ in range(2):
        await asyncio.gather(*(read(fetcher, host.url("/a"), tenant=tenant) for tenant in "abab"))
        assert len(host.requests) == 2


async def test_a_smaller_cap_has_a_download_of_its_own(host, fetcher):
    host.handlers["/a"] = slow_answer(b"x" * 100)
    small, large = await asyncio.gather(
        read(fetcher, host.url("/a"), 99), read(fetcher, host.url("/a"), 100), return_exceptions=True
    )
    assert isinstance(small, MediaError)
    assert isinstance(large, FetchedMedia) and len(large.data) == 100


async def test_a_caller_that_leaves_does_not_disturb_the_others(host, fetcher):
    host.handlers["/a"] = slow_answer(b"pixels", 0.1)
    callers = [asyncio.create_task(read(fetcher, host.url("/a"))) for _ in range(3)]
    await asyncio.sleep(0.05)
    callers[0].cancel()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [getattr(media, "data", media) for media in results[1:]] == [b"pixels"] * 2


async def test_the_last_caller_to_leave_closes_the_connection(host, fetcher):
    host.handlers["/a"] = drip_body
    callers = [asyncio.create_task(read(fetcher, host.url("/a"))) for _ in range(3)]
    async with asyncio.timeout(60):
        while host.num_open != 1:
            await asyncio.sleep(0.005)
    for caller in callers:
        caller.cancel()
    await host.until_closed()
    host.handlers["/a"] = answer(b"pixels")
    assert (await read(fetcher, host.url("/a"))).data == b"pixels"


async def test_closing_tells_those_who_wait(host):
    host.handlers["/a"] = drip_body
    fetcher = fetcher_of(host)
    caller = asyncio.create_task(read(fetcher, host.url("/a")))
    await asyncio.sleep(0.05)
    await fetcher.aclose()
    with pytest.raises(UnavailableError):
        await caller
    with pytest.raises(UnavailableError):
        await read(fetcher, host.url("/a"))
    await host.until_closed()
    await fetcher.aclose()
