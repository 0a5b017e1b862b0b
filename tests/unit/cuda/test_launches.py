"""How our Triton kernels are launched: with arguments that they have, on tensors of the GPU, over grids of
the right size. What they compute: test_cuda_attention.py and test_triton_codec.py, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention
from cluster.model.cuda import decode_attention
from cluster.model.kv_format import KvCacheDtype, LayerCache, QuantizedRows, kv_segments, layer_cache
from kv_transfer.codecs import checksum, codec
from kv_transfer.codecs.checksum import BlockSums, Checksum
from kv_transfer.codecs.wire_memory import Wire
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import Launch, strict_triton

NUM_HEADS, KV_HEADS, WIDTH, BLOCK_SIZE = 6, 2, 80, 16


@pytest.fixture
def simulated() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as device:
        yield device


@pytest.fixture
def launches(simulated: SimulatedCuda) -> Iterator[list[Launch]]:
    with strict_triton() as made:
        yield made


def cache_of(kv_cache_dtype: KvCacheDtype) -> LayerCache:
    segments = kv_segments([(KV_HEADS, WIDTH)] * 2, BLOCK_SIZE, torch.bfloat16, kv_cache_dtype)
    return layer_cache(BlockMemory(MemoryLayout(segments), 8, "cuda"), 0)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_decode_step_is_two_launches(kv_cache_dtype, is_plain: bool, launches: list[Launch]) -> None:
    sinks = None if is_plain else torch.zeros(NUM_HEADS, dtype=torch.bfloat16, device="cuda")
    layer = LayerAttention(0.3) if is_plain else LayerAttention(0.3, 40, 2.0, sinks)
    query = torch.zeros(3, NUM_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    tables, contexts = torch.zeros(3, 4, dtype=torch.int32, device="cuda"), torch.ones(3, device="cuda").int()
    out = decode_attention.paged_decode(query, cache_of(kv_cache_dtype), tables, contexts, layer, 5)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, torch.bfloat16, "cuda")
    split, reduce = launches
    assert (split.kernel, split.grid) == ("decode_split", (3, KV_HEADS, 5))
    assert (split.arguments["key_scales"] is None) == (kv_cache_dtype == "auto")
    assert split.arguments["QUANTISED"] == (kv_cache_dtype == "int8")
    assert (split.arguments["WINDOW"], split.arguments["HAS_SOFTCAP"]) == (
        (0, False) if is_plain else (40, True)
    )
    assert (split.arguments["GROUP"], split.arguments["GROUP_PAD"], split.arguments["K_PAD"]) == (3, 16, 128)
    assert (reduce.kernel, reduce.grid) == ("decode_reduce", (3 * NUM_HEADS,))
    assert reduce.arguments["HAS_SINKS"] != is_plain and reduce.arguments["SPLITS_PAD"] == 8


def test_int8_rows_are_written_and_gathered_in_one_launch_each(launches: list[Launch]) -> None:
    store = cache_of("int8").key
    assert isinstance(store, QuantizedRows)
    rows = torch.zeros(KV_HEADS, 5, WIDTH, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    decode_attention.write_quantised(store, torch.arange(5, device="cuda"), rows)
    found = decode_attention.gather_quantised(store, torch.arange(37, device="cuda"), torch.bfloat16)
    assert (found.shape, found.device.type) == ((37, KV_HEADS, WIDTH), "cuda")
    write, gather = launches
    assert (write.kernel, write.grid) == ("write_quantised", (5, KV_HEADS))
    assert (write.arguments["row_stride"], write.arguments["head_stride"]) == (WIDTH, 5 * WIDTH)
    assert (gather.kernel, gather.grid) == ("gather_quantised", (3, KV_HEADS))


CODED = MemoryLayout(kv_segments([(KV_HEADS, WIDTH)] * 4, BLOCK_SIZE, torch.bfloat16))


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codec, checksum):
        monkeypatch.setattr(module, "has_triton", lambda: True)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_wire_codes_all_that_is_asked_for_in_one_launch(
    name, launches: list[Launch], triton_everywhere, simulated: SimulatedCuda
) -> None:
    kv = BlockMemory(CODED, 8, "cuda")
    wire = Wire(kv, name, 3 * 64)
    launches.clear()
    num_syncs = simulated.num_syncs
    coded = [wire.encode([[0, 3, 5, 1], [7, 6, 2, 4]], [2, 0], [1]), wire.encode([[0, 1, 2, 3]], [1], [0, 1])]
    decoded = wire.decode([1], [[0, 1, 2, 3]])
    assert not launches
    wire.begin()
    assert [launch.arguments["ENCODES"] for launch in launches] == [True, False]
    assert not any(pending.is_done() for pending in (*coded, decoded))
    assert simulated.num_syncs == num_syncs
    encoding, decoding = launches
    assert encoding.arguments["jobs"].tolist() == [
        [1, 2, 0, 3, 5, 1], [1, 0, 7, 6, 2, 4], [0, 1, 0, 1, 2, 3], [1, 1, 0, 1, 2, 3],
    ]  # fmt: skip
    assert encoding.grid == (4 * 2 * 4,) and decoding.grid == (2 * 2 * 4,)  # 2 heads, 2 runs of channels
    assert encoding.arguments["kv"].data_ptr() == kv.base_address
    kv.synchronize()
    assert all(pending.is_done() for pending in (*coded, decoded))


def test_the_checks_of_several_leases_are_one_launch_and_no_wait(
    launches: list[Launch], triton_everywhere, simulated: SimulatedCuda
) -> None:
    sums = BlockSums(BlockMemory(CODED, 8, "cuda"))
    launches.clear()
    simulated.operators.clear()
    num_syncs = simulated.num_syncs
    found = [sums.of([3, 1]), sums.of([]), sums.match([4], Checksum("tensor", 0))]
    sums.begin()
    (launch,) = launches
    assert (launch.kernel, launch.grid) == ("sum_blocks", (3, 4))
    assert simulated.operators.count("aten._to_copy.default") == 1, "one copy of ids"
    assert [pending.is_done() for pending in found] == [False, True, False]
    sums.begin()
    assert len(launches) == 1 and simulated.num_syncs == num_syncs
    assert launch.arguments["blocks"].tolist() == [[0, 0, 3], [0, 1, 1], [1, 0, 4]]
