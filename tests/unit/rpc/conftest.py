from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.rpc.two_ends import Worker


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    tmp_path.chmod(0o700)
    worker = Worker(f"unix:{tmp_path}/s.sock")
    await worker.server.start()
    yield worker
    await worker.server.aclose()
