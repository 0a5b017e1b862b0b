"""A request flow for tests; at its end every request has ended and nothing is held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.scripted_flow import ScriptedFlow


@pytest.fixture
def door() -> Iterator[ScriptedFlow]:
    door = ScriptedFlow()
    yield door
    door.audit()
