"""schemathesis asks the API what its own `/openapi.json` allows and forbids: no answer may be a server's
error or of another form than the document says, and nothing that the document forbids may be accepted.

In every run the endpoints of conversations are asked the document's examples alone: `tests/unit/api/
test_extremes.py` holds each of their fields against the document. Their 5,500 requests about limits are
slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.own_document import LIMITS, ask
from tests.fakes.fake_door import FakeDoor
from tests.fakes.http_server import serving

CONVERSATIONS = "^/v1/(chat/completions|completions|responses|messages.*)$"


@pytest.fixture
def url() -> Iterator[str]:
    """Of the API on a thread of its own."""
    ready, may_end, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with serving(FakeDoor()) as url:
            found.append(url)
            ready.set()
            await asyncio.to_thread(may_end.wait)

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(asyncio.run, serve())
        assert ready.wait(60)
        yield found[0]
        may_end.set()
        served.result(60)


@pytest.mark.parametrize(
    "only_examples_of", [CONVERSATIONS, pytest.param("", marks=pytest.mark.slow)], ids=["most", "all"]
)
def test_the_api_does_what_its_document_says(url, only_examples_of):
    assert ask(url, LIMITS, only_examples_of=only_examples_of) == ""


def test_asking_without_end_is_an_error():
    assert ask("http://127.0.0.1:9", LIMITS, limit_s=0.01).startswith("no end within 0.01 s")
