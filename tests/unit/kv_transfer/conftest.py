from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.kv_transfer.test_leases import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.let_everything_end()
    pair.audit()
