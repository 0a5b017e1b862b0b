"""Settings of torch that tests on a GPU ask for."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact_products(monkeypatch) -> None:
    """float32 is multiplied as such."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
