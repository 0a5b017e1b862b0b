"""A simulated GPU, and what is launched on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import Launch, strict_triton


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as simulated:
        yield simulated


@pytest.fixture
def launches(device: SimulatedCuda) -> Iterator[list[Launch]]:
    with strict_triton() as made:
        yield made
