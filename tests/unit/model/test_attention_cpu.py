"""The native attention of every variant that this CPU runs against dense attention, and against the torch
backend where the bits must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.attention_cpu import CpuAttention, can_run, visible_ranges
from cluster.model.attention_torch import TorchAttention
from cluster.model.cpu.library import load_variant
from cluster.model.kv_format import LayerCache
from cluster.model.language_parts import make_backend
from cluster.native.variants import runnable_variants
from tests.unit.model.attention_cases import Shape, Spans, dense, make_step, run

LIBRARIES = {
    variant.name: kernels.cdll for variant in runnable_variants() if (kernels := load_variant(variant))
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no native kernels for this CPU, or no compiler")


class NoFallback:
    """A fallback that must not be needed."""

    def write(self, batch: PagedBatch, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        raise AssertionError("wrote through the fallback")

    def attend(self, batch, layer, query, new_key, new_value, cache) -> torch.Tensor:
        raise AssertionError("attended through the fallback")


def native(name: str, fallback: Any = None) -> CpuAttention:
    backend: Any = fallback or NoFallback()
    return CpuAttention(LIBRARIES[name], backend)


each_variant = pytest.mark.parametrize("variant", LIBRARIES)
each_format = pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def shape_of(heads, widths, block_size, dtype, kv_cache_dtype) -> Shape:
    (num_heads, num_kv_heads), (key_width, value_width) = heads, widths
    return Shape(num_heads, num_kv_heads, key_width, value_width, block_size, dtype, kv_cache_dtype)


@each_variant
@each_dtype
@each_format
@settings(max_examples=40)
@given(
    widths=st.sampled_from([(16, 16), (24, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128),
                            (256, 256), (20, 12), (6, 10)]),
    heads=st.sampled_from([(4, 2), (7, 1), (14, 2), (3, 3)]),
    sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=3),
    decode=st.booleans(),
    block_size=st.sampled_from([1, 3, 16, 32]),
    window=st.sampled_from([None, 1, 9, 150]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    spans=st.sampled_from(Spans),
)  # fmt: skip
def test_native_attention_equals_dense_attention(
    variant, dtype, kv_cache_dtype, widths, heads, sizes, decode, block_size, window, softcap, sinks, spans
) -> None:
    if decode:
        sizes = [(context, 1) for context, _ in sizes]
    shape = shape_of(heads, widths, block_size, dtype, kv_cache_dtype)
    step = make_step(shape, sizes, spans)
    layer = LayerAttention(
        widths[0] ** -0.5, window, softcap, torch.linspace(-1, 1, heads[0]) if sinks else None
    )
    out = run(native(variant), step, layer)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), dense(shape, step, layer), rtol=tolerance, atol=tolerance)


@each_variant
@each_dtype
@each_format
def test_a_long_context_is_split_and_merged(variant, dtype, kv_cache_dtype) -> None:
    shape = Shape(14, 2, 64, 64, 16, dtype, kv_cache_dtype)
    for window, sizes in ((None, [(1500, 1), (3, 1)]), (700, [(1500, 1)]), (None, [(1100, 5)])):
        step = make_step(shape, sizes)
        layer = LayerAttention(0.125, window, None, torch.linspace(-1, 1, 14))
        expected = dense(shape, step, layer)
        tolerance = TOLERANCE[dtype]
        out = run(native(variant), step, layer)
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@each_variant
@each_dtype
@each_format
@pytest.mark.parametrize("widths", [(64, 64), (96, 40), (7, 130)])
def test_native_writes_leave_the_same_bytes_as_torch_writes(variant, dtype, kv_cache_dtype, widths) -> None:
    shape = shape_of((4, 2), widths, 4, dtype, kv_cache_dtype)
    native_step, torch_step = make_step(shape, [(3, 30), (0, 9)]), make_step(shape, [(3, 30), (0, 9)])
    scale = torch.logspace(-9, 4, len(native_step.key), dtype=torch.float64)[:, None, None]
    scale[5] = 0
    key, value = ((rows * scale).to(dtype) for rows in (native_step.key, native_step.value))
    strided = key.transpose(0, 1).contiguous().transpose(0, 1)
    native(variant).write(native_step.batch, native_step.cache, strided, value)
    TorchAttention().write(torch_step.batch, torch_step.cache, key, value)
    for ours, theirs in zip(native_step.batch.kv.segments, torch_step.batch.kv.segments, strict=True):
        assert torch.equal(ours, theirs)


@each_variant
@each_format
def test_a_sequence_gets_the_same_bits_alone_in_company_and_in_another_number_of_threads(
    variant, kv_cache_dtype
) -> None:
    shape = Shape(14, 2, 64, 64, 16, torch.bfloat16, kv_cache_dtype)
    step = make_step(shape, [(1500, 1), (40, 1), (600, 1)])
    layer = LayerAttention(0.125)
    together = run(native(variant), step, layer)
    batch, threads = step.batch, torch.get_num_threads()
    try:
        for i in range(3):
            torch.set_num_threads(1 + i % 2)
            alone = PagedBatch(
                batch.kv, 16, batch.slots[i : i + 1], [1], batch.context_lens[i : i + 1],
                batch.block_tables[i : i + 1], batch.context_lens_tensor[i : i + 1], [[]],
            )  # fmt: skip
            own = slice(i, i + 1)
            out = native(variant).attend(
                alone, layer, step.query[own], step.key[own], step.value[own], step.cache
            )
            assert torch.equal(out, together[own])
    finally:
        torch.set_num_threads(threads)


@each_variant
def test_a_chunk_gets_the_same_bits_as_the_whole_prompt(variant) -> None:
    shape = Shape(4, 2, 64, 64, 16, torch.bfloat16, "int8")
    layer = LayerAttention(0.125)
    step = make_step(shape, [(0, 400)])
    whole = run(native(variant), step, layer)
    own = slice(130, 400)
    rest = PagedBatch(
        step.batch.kv,
        16,
        step.batch.slots[own],
        [270],
        [400],
        step.batch.block_tables,
        torch.tensor([400]),
        [[]],
    )
    out = native(variant).attend(rest, layer, step.query[own], step.key[own], step.value[own], step.cache)
    assert torch.equal(out, whole[own])


def test_what_the_kernels_do_not_know_goes_to_the_fallback() -> None:
    name = next(iter(LIBRARIES))
    layer = LayerAttention(0.05)
    for shape in (Shape(4, 2, 320, 16), Shape(4, 2, 16, 264), Shape(129, 1), Shape(dtype=torch.float16)):
        step = make_step(shape, [(5, 3)])
        assert not can_run(step.query, step.cache)
        out = run(native(name, TorchAttention()), step, layer)
        torch.testing.assert_close(out.float(), dense(shape, step, layer), rtol=1e-2, atol=1e-2)


def test_visible_ranges_end_behind_the_token_or_at_the_end_of_its_span() -> None:
    step = make_step(Shape(), [(10, 4), (0, 2)])
    step.batch.bidirectional_spans = [[(9, 13)], []]
    begins, ends = visible_ranges(step.batch, 3)
    assert ends.tolist() == [13, 13, 13, 14, 1, 2]
    assert begins.tolist() == [8, 9, 10, 11, 0, 0]


def test_the_cpu_backend_is_native() -> None:
    assert isinstance(make_backend(torch.device("cpu"), torch.bfloat16), CpuAttention)
