"""The door's part, for a module's own `rig`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.engines import Rig
from tests.fakes.relay import Relay


@pytest.fixture
def relay(rig: Rig) -> Iterator[Relay]:
    relay = Relay(rig)
    yield relay
    relay.finish()
