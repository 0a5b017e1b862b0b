from __future__ import annotations

import pytest

from tests.fakes.fake_door import FakeDoor


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor()
