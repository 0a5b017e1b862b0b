"""A media host on loopback, and a fetcher whose operator allows that host."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.media.fetch import Fetcher
from tests.contract.fetch_host import MediaHost
from tests.contract.fetching import fetcher_of


@pytest.fixture
async def host() -> AsyncIterator[MediaHost]:
    async with MediaHost() as host:
        yield host


@pytest.fixture
async def fetcher(host: MediaHost) -> AsyncIterator[Fetcher]:
    fetcher = fetcher_of(host)
    yield fetcher
    await fetcher.aclose()
