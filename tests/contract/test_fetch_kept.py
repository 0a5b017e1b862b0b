"""What the fetcher keeps of an answer, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import MediaError
from tests.contract.fetch_host import Request, answer, redirect
from tests.contract.fetching import fetcher_of, read
from tests.fakes.clock import ManualClock


async def test_an_answer_is_kept_only_as_long_as_its_host_says(host):
    clock = ManualClock()
    fetcher = fetcher_of(host, clock)
    host.handlers["/a"] = answer(b"pixels", cache_control="max-age=60")
    for at, num_requests in ((0, 1), (59, 1), (60, 2), (119, 2), (121, 3)):
        clock.at = at
        assert (await read(fetcher, host.url("/a"))).data == b"pixels"
        assert len(host.requests) == num_requests
    await fetcher.aclose()


@pytest.mark.parametrize(
    "control", ["", "no-store", "no-cache, max-age=60", "max-age=0", "max-age=60, no-store"]
)
async def test_without_permission_a_url_is_asked_again(host, fetcher, control):
    host.handlers["/a"] = answer(b"pixels", cache_control=control)
    for _ in range(2):
        await read(fetcher, host.url("/a"))
    assert len(host.requests) == 2


async def test_a_redirect_that_may_not_be_kept_is_asked_again(host, fetcher):
    host.handlers["/a"] = redirect("/b")
    host.handlers["/b"] = answer(b"pixels", cache_control="max-age=60")
    for _ in range(2):
        await read(fetcher, host.url("/a"))
    assert [request.path for request in host.requests] == ["/a", "/b"] * 2


async def test_a_kept_answer_is_held_against_the_cap_of_its_caller(host, fetcher):
    host.handlers["/a"] = answer(b"x" * 100, cache_control="max-age=60")
    await read(fetcher, host.url("/a"))
    with pytest.raises(MediaError, match="larger than 99 bytes"):
        await read(fetcher, host.url("/a"), 99)
    assert len(host.requests) == 1


def versioned(body: bytes, etag: str):
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.headers.get("if-none-match") == etag:
            await answer(b"", "304 Not Modified", content_length="", etag=etag)(request, writer)
        else:
            await answer(body, etag=etag)(request, writer)

    return handle


async def test_an_unchanged_item_is_not_sent_again_and_a_changed_one_is(host, fetcher):
    host.handlers["/a"] = redirect("/b")
    host.handlers["/b"] = versioned(b"old", '"1"')
    for _ in range(3):
        assert (await read(fetcher, host.url("/a"))).data == b"old"
    asked = [request.headers.get("if-none-match") for request in host.requests]
    assert asked == [None, None, None, '"1"', None, '"1"']
    host.handlers["/b"] = versioned(b"new", '"2"')
    assert (await read(fetcher, host.url("/a"))).data == b"new"


async def test_validators_go_only_to_the_url_that_gave_them(host, fetcher):
    host.handlers["/a"] = redirect("/b")
    host.handlers["/b"] = versioned(b"old", '"1"')
    await read(fetcher, host.url("/a"))
    host.handlers["/a"] = redirect("/c")
    host.handlers["/c"] = answer(b"other")
    assert (await read(fetcher, host.url("/a"))).data == b"other"
    assert "if-none-match" not in host.requests[-1].headers


async def test_equal_contents_are_stored_once(host, fetcher):
    host.handlers |= {path: answer(b"x" * 1000, cache_control="max-age=60") for path in ("/a", "/b", "/c")}
    media = [await read(fetcher, host.url(path)) for path in ("/a", "/b", "/c")]
    assert len({id(item.data) for item in media}) == 1
