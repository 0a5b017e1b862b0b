"""The native kernels that this processor runs, for the tests of every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.model.cpu.library import load_variant
from cluster.native.variants import runnable_variants

LOADED = {variant.name: kernels for variant in runnable_variants() if (kernels := load_variant(variant))}
best_kernels: Any = next(iter(LOADED.values()), None)  # None: `needs_kernels` skips

needs_kernels = pytest.mark.skipif(not LOADED, reason="no native kernels for this CPU, or no compiler")
each_variant = pytest.mark.parametrize("kernels", LOADED.values(), ids=LOADED.keys())
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
