from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cluster.errors import ConfigError
from cluster.worker.memory_plan import MemoryPlan, available_bytes, encoder_step_bytes, step_bytes

GIB = 1 << 30
PLAN = MemoryPlan(
    weights=GIB, kv_per_token=12_288, num_kv_tokens=65_536, features=GIB // 8, step=step_bytes(512, 896, 150_000, 8, 2)
)  # fmt: skip


def test_what_fits_is_let_through_to_the_byte():
    PLAN.check(PLAN.wanted)
    with pytest.raises(ConfigError):
        PLAN.check(PLAN.wanted - 1)


def test_a_refusal_shows_the_arithmetic_and_what_would_fit():
    with pytest.raises(ConfigError) as refusal:
        PLAN.check(GIB // 2)
    text = str(refusal.value)
    for part in ("65,536 tokens × 12,288 bytes", "768.0 MiB", "512.0 MiB", "51 × text", "8 × video"):
        assert part in text, text


def test_a_share_of_a_gpu_is_filled_with_blocks_and_no_further():
    beside = replace(PLAN, num_kv_tokens=0)
    block = 16 * beside.kv_per_token
    total, used = 24 * GIB, 3 * GIB // 2  # of it the weights are one
    num_blocks = beside.blocks_within(16, 0.9, total, used, available=total - used)
    taken = used + beside.wanted + num_blocks * block
    assert taken <= 0.9 * total < taken + block
    # Others have memory of this GPU, too.
    fewer = beside.blocks_within(16, 0.9, total, used, available=8 * GIB)
    assert fewer * block + beside.wanted <= 8 * GIB < (fewer + 1) * block + beside.wanted


def test_a_share_without_room_for_kv_is_refused_with_the_arithmetic():
    beside = replace(PLAN, num_kv_tokens=0)
    with pytest.raises(
        ConfigError, match=r"memory_share 0.1 of 4,096.0 MiB leaves no room for KV(.|\n)*weights"
    ):
        beside.blocks_within(16, 0.1, 4 * GIB, 0, 4 * GIB)


def test_recorded_steps_are_counted_and_named():
    recorded = replace(PLAN, graphs=GIB // 4)
    assert recorded.wanted == PLAN.wanted + GIB // 4
    assert "recorded steps          256.0 MiB" in recorded.describe(GIB)
    assert "recorded" not in PLAN.describe(GIB)


def test_an_encoder_counts_its_cache_and_the_spike_of_its_largest_batch():
    config = SimpleNamespace(
        vision_config=SimpleNamespace(hidden_size=1280), audio_config=SimpleNamespace(d_model=64)
    )
    spike = encoder_step_bytes(16_384, cast(Any, config), itemsize=2)
    assert spike == 16_384 * 4 * 1280 * 28
    plan = MemoryPlan(weights=GIB, step=spike, features=GIB // 4, inputs=GIB // 2)
    with pytest.raises(ConfigError) as refusal:
        plan.check(plan.wanted - 1)
    for part in ("2,240.0 MiB", "256.0 MiB", "512.0 MiB"):
        assert part in str(refusal.value)
    assert "KV" not in str(refusal.value) and "fits in" not in str(refusal.value)


def test_available_memory_is_what_the_machine_has():
    assert GIB // 8 < available_bytes(torch.device("cpu")) < 1 << 45
