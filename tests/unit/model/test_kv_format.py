"""Rows into block memory and back, plain and quantised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import (
    GROUP_WIDTH,
    KvCacheDtype,
    dequantise,
    kv_segments,
    layer_cache,
    num_groups,
    quantise,
)

HEADS, K_WIDTH, V_WIDTH, BLOCK_SIZE, NUM_BLOCKS = 2, 80, 24, 4, 6


def memory(
    kv_cache_dtype: KvCacheDtype, dtype: torch.dtype = torch.float32, num_layers: int = 2
) -> BlockMemory:
    shapes = [(HEADS, K_WIDTH), (HEADS, V_WIDTH)] * num_layers
    return BlockMemory(MemoryLayout(kv_segments(shapes, BLOCK_SIZE, dtype, kv_cache_dtype)), NUM_BLOCKS)


@settings(max_examples=200)
@given(
    width=st.integers(1, 200),
    exponent=st.integers(-10, 10),
    outlier=st.sampled_from([1.0, 20.0, 1000.0]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_quantised_element_is_off_by_half_a_scale_at_most(
    width: int, exponent: int, outlier: float, seed: int, dtype: torch.dtype
) -> None:
    rows = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    rows[..., seed % width] *= outlier
    rows = rows.to(dtype)
    codes, scales = quantise(rows)
    step = scales.float().repeat_interleave(GROUP_WIDTH, -1)[..., :width]
    error = (dequantise(codes, scales, torch.float32) - rows.float()).abs()
    assert (error <= step * 0.5001 + 4e-6).all()
    assert scales.shape == (3, 2, num_groups(width))


def test_zeros_stay_zeros_and_tiny_rows_do_not_blow_up() -> None:
    codes, scales = quantise(torch.tensor([[0.0] * 70, [1e-30] * 70, [1e-7] * 70]))
    assert not codes.any()
    assert not dequantise(codes, scales, torch.float32).any()


def test_quantising_what_was_dequantised_changes_nothing() -> None:
    codes, scales = quantise(torch.randn(5, 2, 100, generator=torch.Generator().manual_seed(1)))
    again, scales_again = quantise(dequantise(codes, scales, torch.float32))
    assert torch.equal(codes, again)
    torch.testing.assert_close(scales, scales_again, rtol=1e-3, atol=0)


def test_groups_do_not_share_a_scale() -> None:
    row = torch.cat([torch.full((GROUP_WIDTH,), 1000.0), torch.full((6,), 0.001)])
    assert torch.allclose(dequantise(*quantise(row), torch.float32), row, rtol=1e-3)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_rows_come_back_from_their_slots_and_no_other_slot_changes(
    kv_cache_dtype: KvCacheDtype, dtype: torch.dtype
) -> None:
    kv = memory(kv_cache_dtype, dtype)
    cache = layer_cache(kv, 1)
    slots = torch.tensor([9, 4, 23, 0])
    key, value = torch.randn(4, HEADS, K_WIDTH).to(dtype), torch.randn(4, HEADS, V_WIDTH).to(dtype)
    cache.write(slots, key, value)
    for store, rows in ((cache.key, key), (cache.value, value)):
        expected = rows if kv_cache_dtype == "auto" else dequantise(*quantise(rows), dtype)
        assert torch.equal(store.rows(slots, dtype), expected)
        others = torch.tensor([slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in slots.tolist()])
        assert not store.rows(others, dtype).any()
    untouched = layer_cache(kv, 0)
    assert not untouched.key.rows(slots, dtype).any()
    assert not untouched.value.rows(slots, dtype).any()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_the_rows_of_their_slots(kv_cache_dtype: KvCacheDtype, dtype: torch.dtype) -> None:
    cache = layer_cache(memory(kv_cache_dtype), 0)
    everywhere = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    cache.write(
        everywhere, torch.randn(len(everywhere), HEADS, K_WIDTH), torch.randn(len(everywhere), HEADS, V_WIDTH)
    )
    buffer = torch.full((10_000,), float("nan"), dtype=dtype)
    blocks = cache.key.blocks(torch.tensor([5, 2]), dtype, buffer)
    slots = torch.cat([everywhere[20:24], everywhere[8:12]])
    assert torch.equal(blocks.flatten(0, 1), cache.key.rows(slots, dtype))
    assert blocks.data_ptr() == buffer.data_ptr()


def test_int8_takes_about_half_the_bytes_of_bf16() -> None:
    plain = MemoryLayout(kv_segments([(2, 64), (2, 64)], 16, torch.bfloat16))
    int8 = MemoryLayout(kv_segments([(2, 64), (2, 64)], 16, torch.bfloat16, "int8"))
    assert plain.block_bytes == 16 * 2 * 2 * 64 * 2
    assert int8.block_bytes == 16 * 2 * 2 * (64 + 2)
    assert plain.fingerprint != int8.fingerprint


def test_copied_blocks_are_equal_in_every_segment():
    memory = BlockMemory(MemoryLayout(kv_segments([(2, 8), (2, 4)], 4, torch.float32, "int8")), 5)
    for segment in memory.segments:
        segment.copy_(torch.randint(-100, 100, segment.shape))
    memory.copy_blocks([0, 3], [4, 1])
    for segment in memory.segments:
        assert segment[4].equal(segment[0]) and segment[1].equal(segment[3])
