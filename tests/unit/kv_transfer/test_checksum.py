"""The checksum: native code and numpy agree, cuts make no difference, every flipped bit and every exchange is
found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.native.variants import runnable_variants
from kv_transfer.codecs import native as native_code
from kv_transfer.codecs.checksum import (
    BlockSums,
    Checksum,
    checksum,
    native_checksum,
    numpy_checksum,
    tensor_checksum,
)
from tests.fakes.slow_memory import SlowMemory

VARIANTS = {v.name: cdll for v in runnable_variants() if (cdll := native_code.load_variant(v))}
sizes = st.one_of(st.integers(0, 40), st.integers(2000, 2100), st.integers(4000, 9000))


def data_of(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def descriptors(*parts: np.ndarray) -> np.ndarray:
    rows = [(part.ctypes.data, part.nbytes) for part in parts]
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def sum_of(data: np.ndarray) -> int:
    return checksum(descriptors(data))


@pytest.mark.skipif(not VARIANTS, reason="no native kernels for this CPU, or no compiler")
@settings(max_examples=60)
@given(lengths=st.lists(sizes, max_size=6), seed=st.integers(0, 99), gap=st.integers(0, 9))
def test_native_and_numpy_agree_wherever_the_bytes_lie(lengths: list[int], seed: int, gap: int) -> None:
    parts = [data_of(gap + length, seed + i)[gap:] for i, length in enumerate(lengths)]
    expected = numpy_checksum(descriptors(*parts))
    assert {native_checksum(descriptors(*parts), native) for native in VARIANTS.values()} == {expected}


@settings(max_examples=60)
@given(size=sizes, seed=st.integers(0, 99), cuts=st.lists(st.floats(0, 1), max_size=5))
def test_how_the_stream_is_cut_does_not_matter(size: int, seed: int, cuts: list[float]) -> None:
    data = data_of(size, seed)
    parts = np.split(data, sorted(int(cut * size) for cut in cuts))
    assert checksum(descriptors(*parts)) == sum_of(data)


@settings(max_examples=100)
@given(size=sizes, seed=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_shows(size: int, seed: int, place: float, bit: int) -> None:
    assume(size > 0)
    data = data_of(size, seed)
    before = sum_of(data)
    data[int(place * size)] ^= 1 << bit
    assert sum_of(data) != before


@settings(max_examples=100)
@given(
    first=st.integers(0, 1023),
    distance=st.sampled_from([1, 2, 8, 255, 256, 257, 512, 768]),
    difference=st.sampled_from([1, 1 << 31, 1 << 32, 1 << 63, (1 << 63) | (1 << 31), (1 << 64) - 1]),
    fill=st.sampled_from([0, 7]),
)
def test_exchanging_two_words_shows_even_where_they_differ_in_one_bit(
    first: int, distance: int, difference: int, fill: int
) -> None:
    words = np.full(2048, fill, dtype=np.uint64)
    words[first] ^= np.uint64(difference)
    before = sum_of(words)
    words[[first, first + distance]] = words[[first + distance, first]]
    assert sum_of(words) != before


@given(seed=st.integers(0, 99), block=st.sampled_from([8, 64, 2048, 4096]))
@settings(max_examples=30)
def test_exchanging_two_blocks_shows(seed: int, block: int) -> None:
    data = data_of(4 * block, seed)
    parts = np.split(data, 4)
    assert checksum(descriptors(*parts)) != checksum(descriptors(parts[0], parts[2], parts[1], parts[3]))


def test_two_flips_of_the_same_bit_of_one_stream_do_not_cancel() -> None:
    words = np.zeros(1024, dtype=np.uint64)
    sums = {sum_of(words)}
    for bit in range(64):
        flipped = words.copy()
        flipped[[3, 3 + 256]] ^= np.uint64(1 << bit)
        sums.add(sum_of(flipped))
    assert len(sums) == 65


def test_zeros_of_every_length_differ() -> None:
    assert len({sum_of(np.zeros(size, dtype=np.uint8)) for size in range(600)}) == 600


def test_the_value_is_part_of_the_protocol() -> None:
    assert sum_of(np.arange(5000, dtype=np.uint16)) == 13261138555906945432


def blocks_of(*shapes: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    return [torch.from_numpy(data_of(n * size, seed + i)).view(n, size) for i, (n, size) in enumerate(shapes)]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 99), st.data())
def test_every_flipped_bit_changes_the_sum_that_gpus_make(count, size, seed, data):
    blocks = blocks_of((count, size), (count, 24), seed=seed)
    before = tensor_checksum(blocks)
    segment = blocks[data.draw(st.integers(0, 1))].flatten()
    segment[data.draw(st.integers(0, len(segment) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert 0 <= before < 2**64 and tensor_checksum(blocks) != before


def test_exchanged_words_blocks_and_segments_change_the_sum_that_gpus_make():
    blocks = blocks_of((3, 64), (3, 64))
    sign = blocks[0].clone()
    sign[0, 7] ^= 0x80  # the highest bit of a word: a difference that odd weights alone could not place
    exchanged = {
        "nothing": tensor_checksum(blocks),
        "words": tensor_checksum(
            [blocks[0].view(torch.int64).flip(1).contiguous().view(torch.uint8), blocks[1]]
        ),
        "blocks": tensor_checksum([blocks[0].flip(0), blocks[1]]),
        "segments": tensor_checksum([blocks[1], blocks[0]]),
        "a sign": tensor_checksum([sign, blocks[1]]),
        "another sign": tensor_checksum([sign.view(torch.int64).roll(1, 1).view(torch.uint8), blocks[1]]),
    }
    assert len(set(exchanged.values())) == len(exchanged)


def test_a_cpu_checks_what_a_gpu_sent_and_a_gpu_leaves_a_cpus_sum_alone():
    memory = BlockMemory(MemoryLayout((SegmentSpec(4, (3,), torch.bfloat16),)), 4)
    memory.segments[0].normal_()
    sum_of_gpu = Checksum(
        "tensor", tensor_checksum([memory.segments[0][[2, 1]].flatten(1).view(torch.uint8)])
    )
    sums = BlockSums(memory)
    assert sums.match([2, 1], sum_of_gpu).value() and not sums.match([1, 2], sum_of_gpu).value()
    assert sums.match([2, 1], sums.of([2, 1]).value()).value() and sums.match([2], None).value()
    on_device = BlockSums(SlowMemory(memory.layout, 4))
    assert on_device.match([2, 1], Checksum("stream", 1)).value()
