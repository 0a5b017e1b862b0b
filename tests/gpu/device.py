"""What tests of Triton's launches need."""

from __future__ import annotations

import pytest
import torch

from cluster.config.machine import has_triton


def triton_device() -> torch.device:
    """Returns the GPU; skips the module that asks where there is none, or nothing compiles for it."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here", allow_module_level=True)
    if not has_triton():
        pytest.skip("triton or its C compiler is not installed", allow_module_level=True)
    return torch.device("cuda")
