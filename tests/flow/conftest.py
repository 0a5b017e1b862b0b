"""A cluster that tests of one file share, if they change nothing of it and run on the file's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from tests.fakes.clock import Leaps, leaping_clocks
from tests.flow.local_cluster import LocalCluster
from tests.flow.losses import StandIns
from tests.flow.media_client import serving

Served = tuple[LocalCluster, httpx.AsyncClient]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(_served: Served) -> AsyncIterator[Served]:
    """A cluster as it comes, with a client; it is audited after each test."""
    yield _served
    await _served[0].audit()


@pytest.fixture
def clocks() -> Iterator[Leaps]:
    with leaping_clocks() as leaps:
        yield leaps


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    stand_ins = StandIns(monkeypatch)
    yield stand_ins
    stand_ins.kill_all()
