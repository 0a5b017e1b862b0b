from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seeded() -> Iterator[None]:
    """Without gradients."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
