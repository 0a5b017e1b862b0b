"""The codecs: bounds on the error, the limits of float16, equal bytes from native code and torch, addresses,
layers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.codec import attention_error, decode_groups, encode_groups
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from cluster.native.variants import runnable_variants
from kv_transfer.codecs import native as native_code
from kv_transfer.codecs import quantisation
from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.quantisation import CodecName

VARIANTS = {v.name: cdll for v in runnable_variants() if (cdll := native_code.load_variant(v))}
NATIVE = native_code.load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-10}  # of a product, relative
MAX_CODE: dict[CodecName, int] = {"int8": 127, "int4": 7}

each_codec = pytest.mark.parametrize("name", quantisation.CODECS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
needs_native = pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU, or no compiler")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def layout_of(
    key: tuple[int, int], value: tuple[int, int], dtype: torch.dtype, block_size: int = 16, layers: int = 2
) -> MemoryLayout:
    return MemoryLayout(kv_segments([key, value] * layers, block_size, dtype))


def filled(layout: MemoryLayout, num_blocks: int) -> BlockMemory:
    memory = BlockMemory(layout, num_blocks)
    for segment in memory.segments:
        segment.normal_()
    return memory


def spoil(memory: BlockMemory) -> None:
    """Zeros, tiny and huge numbers, infinities and NaN in places that differ between K and V."""
    for index, segment in enumerate(memory.segments):
        rows = segment.flatten(0, 1)
        rows[..., 0] = 0
        rows[index] = 0
        rows[5 + index] *= 1e-6
        rows[9 + index] *= 3e-5
        rows[..., -1] *= 2e-6
        rows[17 + index, 0] = 6e4 if segment.dtype == torch.float16 else 1e30
        rows[70 + index, -1, 0] = torch.nan
        rows[90 + index, 0, -1] = -torch.inf


def arrives(codec: Codec, kv: BlockMemory, blocks: np.ndarray) -> tuple[BlockMemory, BlockMemory]:
    """The wire memory, and a new cache with what was decoded from it."""
    wire, target = BlockMemory(codec.wire_layout, len(blocks)), BlockMemory(kv.layout, kv.num_blocks)
    encode_groups(codec, kv, blocks, wire, np.arange(len(blocks)))
    decode_groups(codec, wire, np.arange(len(blocks)), target, blocks)
    return wire, target


def bound(rows: Tensor, is_key: bool, name: CodecName) -> Tensor:
    """rows [64, H, D] float64: the largest error that an element may have."""
    largest = rows.abs().amax(0, keepdim=True).expand_as(rows)
    if not is_key:
        runs = [
            run.abs().amax(-1, keepdim=True).expand_as(run)
            for run in rows.split(quantisation.RUN_CHANNELS, -1)
        ]
        largest = torch.cat(runs, -1)
    scale = largest / MAX_CODE[name]
    return scale * 0.5 * (1 + 2**-10) + scale * MAX_CODE[name] * 2**-11 + MAX_CODE[name] * 2**-25


@each_codec
@each_dtype
@settings(max_examples=15)
@given(
    heads=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    block_size=st.sampled_from([1, 4, 16, 64]),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
)
def test_every_element_arrives_within_half_a_scale(name, dtype, heads, widths, block_size, magnitude) -> None:
    layout = layout_of((heads, widths[0]), (heads, widths[1]), dtype, block_size, layers=1)
    kv = filled(layout, 128 // block_size)
    for segment in kv.segments:
        segment *= magnitude
    blocks = np.random.default_rng(0).permutation(kv.num_blocks).reshape(2, -1)
    _, target = arrives(Codec(layout, name), kv, blocks)
    for index, (sent, arrived) in enumerate(zip(kv.segments, target.segments, strict=True)):
        for group in blocks:
            rows, rows_arrived = (segment[group].flatten(0, 1).double() for segment in (sent, arrived))
            allowed = bound(rows, index == 0, name) + ROUNDING[dtype] * rows.abs().amax()
            assert ((rows - rows_arrived).abs() <= allowed).all()


@each_codec
@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "shapes", [((8, 128), (8, 128)), ((3, 80), (2, 24)), ((1, 7), (5, 131)), ((1, 1100), (1100, 1))]
)
@needs_native
def test_native_code_makes_the_bytes_of_torch(variant, shapes, dtype, name) -> None:
    key_shape, value_shape = shapes
    layout = layout_of(key_shape, value_shape, dtype)
    kv = filled(layout, 12)
    spoil(kv)
    blocks = np.random.default_rng(0).permutation(12).reshape(3, 4)
    wires, targets = zip(
        *(arrives(Codec(layout, name, way), kv, blocks) for way in (VARIANTS[variant], None)), strict=True
    )
    assert torch.equal(wires[0].buffer, wires[1].buffer)
    assert torch.equal(targets[0].buffer, targets[1].buffer)


@each_codec
@pytest.mark.parametrize("native", [NATIVE, None], ids=["native", "torch"])
def test_what_float16_scales_cannot_hold_behaves_as_documented(name: CodecName, native) -> None:
    layout = layout_of((1, 8), (1, 8), torch.float32, layers=1)
    kv = BlockMemory(layout, 4)
    limit = MAX_CODE[name] * quantisation.MAX_SCALE
    key = kv.segments[0].view(64, 8)
    key[:, 0] = 2 * limit
    key[:, 1] = MAX_CODE[name] * 2.0**-26
    key[:, 2] = MAX_CODE[name] * 2.0**-20
    key[3, 3], key[3, 4], key[:, 5] = torch.nan, -torch.inf, 1.0
    wire, target = arrives(Codec(layout, name, native), kv, np.arange(4)[None])
    arrived = target.segments[0].view(64, 8)
    assert (arrived[:, 0] == limit).all()
    assert (arrived[:, 1] == 0).all() and wire.segments[1][0, 0, 0, 1] == 0
    assert ((arrived[:, 2] - key[:, 2]).abs() <= MAX_CODE[name] * 2.0**-24).all()
    assert arrived[:, 3:5].isnan().all()
    torch.testing.assert_close(arrived[:, 5], key[:, 5], rtol=1e-3, atol=0)
    assert (arrived[:, 6:] == 0).all() and (wire.segments[1][0, 0, 0, 6:] == 0).all()


@each_codec
def test_a_float16_cache_never_overflows_to_infinity(name: CodecName) -> None:
    layout = layout_of((1, 64), (1, 64), torch.float16, layers=1)
    kv = BlockMemory(layout, 4)
    kv.segments[0].fill_(65504)
    kv.segments[1].fill_(-65504)
    _, target = arrives(Codec(layout, name), kv, np.arange(4)[None])
    assert all(segment.isfinite().all() for segment in target.segments)


@each_dtype
@each_codec
def test_the_largest_number_of_every_scale_gets_the_largest_code(name, dtype) -> None:
    layout = layout_of((2, 64), (2, 64), dtype)
    kv = filled(layout, 4)
    wire, _ = arrives(Codec(layout, name, None), kv, np.arange(4)[None])
    key_codes, value_codes = wire.segments[0], wire.segments[2]
    if name == "int8":
        assert (key_codes.abs().amax(1) == 127).all() and (value_codes.abs().amax(-1) == 127).all()
    else:
        both = torch.stack([key_codes.view(torch.int8) << 4 >> 4, key_codes.view(torch.int8) >> 4])
        assert (both.abs().amax((0, 2)) == 7).all()


@pytest.mark.parametrize("width", [64, 128])
def test_the_wire_holds_what_the_format_says(width: int) -> None:
    layout = layout_of((4, width), (4, width), torch.bfloat16)
    raw = 4 * layout.block_bytes
    assert quantisation.wire_layout(layout, "int8").block_bytes == raw * (64 + 2) // 128
    assert raw / quantisation.wire_layout(layout, "int8").block_bytes >= 1.88
    assert raw / quantisation.wire_layout(layout, "int4").block_bytes >= 3.75
    shapes = [(s.rows, s.row_shape) for s in quantisation.wire_layout(layout, "int4").segments[:4]]
    assert shapes == [(32, (4, width)), (1, (4, width)), (32, (4, width)), (64, (4, width // 64))]


@each_codec
@pytest.mark.parametrize("native", [NATIVE, None], ids=["native", "torch"])
def test_only_the_named_groups_and_layers_are_written(name: CodecName, native) -> None:
    layout = layout_of((2, 16), (2, 24), torch.bfloat16, layers=3)
    kv, codec = filled(layout, 9), Codec(layout, name, native)
    wire, target = BlockMemory(codec.wire_layout, 4), BlockMemory(layout, 9)
    wire.buffer.fill_(0x55)
    target.buffer.fill_(0x55)
    encode_groups(codec, kv, [[7, 0, 3, 8]], wire, [2], [1])
    untouched = [
        *wire.segments[:4],
        *wire.segments[8:],
        *(segment[[0, 1, 3]] for segment in wire.segments[4:8]),
    ]
    assert all((part.contiguous().view(torch.uint8) == 0x55).all() for part in untouched)
    decode_groups(codec, wire, [2], target, [[1, 2, 5, 6]])
    others = [part[[0, 3, 4, 7, 8]] for part in target.segments]
    assert all((part.contiguous().view(torch.uint8) == 0x55).all() for part in others)
    errors = [(target.segments[s][[1, 2, 5, 6]] - kv.segments[s][[7, 0, 3, 8]]).abs().max() for s in (2, 3)]
    assert max(errors) < {"int8": 0.04, "int4": 0.5}[name]


@each_codec
@needs_native
def test_calls_on_several_threads_change_nothing(name: CodecName) -> None:
    layout = layout_of((2, 64), (2, 64), torch.bfloat16, layers=3)
    kv, codec = filled(layout, 16), Codec(layout, name)
    blocks, ids = np.arange(16).reshape(4, 4), np.arange(4)
    expected, other = (BlockMemory(codec.wire_layout, 4) for _ in range(2))
    encode_groups(codec, kv, blocks, expected, ids)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda group: encode_groups(codec, kv, blocks[group, None], other, [group]), range(4)))
    assert torch.equal(other.buffer, expected.buffer)


def test_wrong_ids_and_memories_are_refused_before_a_byte_is_written() -> None:
    layout = layout_of((2, 64), (2, 64), torch.bfloat16)
    kv, codec = filled(layout, 8), Codec(layout, "int8")
    wire = BlockMemory(codec.wire_layout, 2)
    with pytest.raises(IndexError):
        encode_groups(codec, kv, [[0, 1, 2, 8]], wire, [0])
    with pytest.raises(IndexError):
        encode_groups(codec, kv, [[0, 1, 2, 3]], wire, [-1])
    with pytest.raises(IndexError):
        encode_groups(codec, kv, [[0, 1, 2, 3]], wire, [0], [2])
    with pytest.raises(ValueError, match="groups of 4"):
        encode_groups(codec, kv, [[0, 1, 2]], wire, [0])
    with pytest.raises(ValueError, match="layout"):
        encode_groups(codec, wire, [[0, 1, 2, 3]], wire, [0])
    assert (wire.buffer == 0).all()


@pytest.mark.parametrize(("block_size", "kv_cache_dtype"), [(128, "auto"), (24, "auto"), (16, "int8")])
def test_blocks_that_do_not_make_groups_have_no_codec(block_size: int, kv_cache_dtype) -> None:
    layout = MemoryLayout(kv_segments([(2, 64), (2, 64)], block_size, torch.bfloat16, kv_cache_dtype))
    assert not quantisation.is_available(layout)
    with pytest.raises(ValueError, match="block"):
        quantisation.wire_layout(layout, "int8")


@each_codec
def test_the_error_metric_is_the_mean_deviation(name: CodecName) -> None:
    layout = layout_of((2, 64), (2, 64), torch.float32)
    kv, codec = filled(layout, 4), Codec(layout, name)
    kv.segments[3].zero_()
    wire, target = arrives(codec, kv, np.arange(4)[None])
    sent, arrived = kv.segments[2], target.segments[2]
    key_error, value_error = codec.relative_error(kv, [0, 1, 2, 3], wire, 0, layer=1).value()
    assert key_error == pytest.approx(float((sent - arrived).abs().mean() / sent.abs().mean()), rel=1e-5)
    assert {"int8": 0.002, "int4": 0.05}[name] < key_error < {"int8": 0.02, "int4": 0.3}[name]
    assert value_error == 0


def test_outlier_channels_of_k_do_not_matter_to_attention() -> None:
    key, value, query = torch.randn(192, 2, 64), torch.randn(192, 2, 64), torch.randn(8, 4, 64)
    larger = torch.where(torch.arange(64) % 16 == 0, 20.0, 1.0)
    bounds: dict[quantisation.CodecName, tuple[float, float]] = {"int8": (0.0, 0.02), "int4": (0.05, 0.3)}
    for codec, (low, high) in bounds.items():
        plain = attention_error(key, value, query, codec, quantisation.RUN_CHANNELS)
        outliers = attention_error(key * larger, value, query / larger, codec, quantisation.RUN_CHANNELS)
        assert low < plain < high
        assert outliers < 1.5 * plain
