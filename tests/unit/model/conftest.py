from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """Without gradients."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def two_threads() -> Iterator[Callable[[int], None]]:
    """Of torch's, until another number is set: the value sets it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)
