"""How the Triton kernels of the wire are launched: with arguments that they have, on tensors of the GPU, over
grids of the right size. What they compute: test_triton_codec.py, in Triton's interpreter. Those of layers and
attention: test_layer_launches.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from kv_transfer.codecs import checksum, codec
from kv_transfer.codecs.checksum import BlockSums, Checksum
from kv_transfer.codecs.wire_memory import Wire
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import Launch, strict_triton

KV_HEADS, WIDTH, BLOCK_SIZE = 2, 80, 16


CODED = MemoryLayout(kv_segments([(KV_HEADS, WIDTH)] * 4, BLOCK_SIZE, torch.bfloat16))


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codec, checksum):
        monkeypatch.setattr(module, "has_triton", lambda: True)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_wire_codes_all_that_is_asked_for_in_one_launch(
    name, launches: list[Launch], triton_everywhere, device: SimulatedCuda
) -> None:
    kv = BlockMemory(CODED, 8, "cuda")
    wire = Wire(kv, name, 3 * 64)
    launches.clear()
    num_syncs = device.num_syncs
    coded = [wire.encode([[0, 3, 5, 1], [7, 6, 2, 4]], [2, 0], [1]), wire.encode([[0, 1, 2, 3]], [1], [0, 1])]
    decoded = wire.decode([1], [[0, 1, 2, 3]])
    assert not launches
    wire.begin()
    assert [launch.arguments["ENCODES"] for launch in launches] == [True, False]
    assert not any(pending.is_done() for pending in (*coded, decoded))
    assert device.num_syncs == num_syncs
    encoding, decoding = launches
    assert encoding.arguments["jobs"].tolist() == [
        [1, 2, 0, 3, 5, 1], [1, 0, 7, 6, 2, 4], [0, 1, 0, 1, 2, 3], [1, 1, 0, 1, 2, 3],
    ]  # fmt: skip
    assert encoding.grid == (4 * 2 * 4,) and decoding.grid == (2 * 2 * 4,)  # 2 heads, 2 runs of channels
    assert encoding.arguments["kv"].data_ptr() == kv.base_address
    kv.synchronize()
    assert all(pending.is_done() for pending in (*coded, decoded))


def test_the_checks_of_several_leases_are_one_launch_and_no_wait(
    launches: list[Launch], triton_everywhere, device: SimulatedCuda
) -> None:
    sums = BlockSums(BlockMemory(CODED, 8, "cuda"))
    launches.clear()
    device.operators.clear()
    num_syncs = device.num_syncs
    found = [sums.of([3, 1]), sums.of([]), sums.match([4], Checksum("tensor", 0))]
    sums.begin()
    (launch,) = launches
    assert (launch.kernel, launch.grid) == ("sum_blocks", (3, 4))
    assert device.operators.count("aten._to_copy.default") == 1, "one copy of ids"
    assert [pending.is_done() for pending in found] == [False, True, False]
    sums.begin()
    assert len(launches) == 1 and device.num_syncs == num_syncs
    assert launch.arguments["blocks"].tolist() == [[0, 0, 3], [0, 1, 1], [1, 0, 4]]


def test_a_thread_launches_on_its_own_device(triton_everywhere) -> None:
    """Each begins on the first one, on which a kernel cannot read what a rank above 0 has. What fails, fails
    at the start."""
    with SimulatedCuda(num_devices=2), strict_triton() as launches:
        memory = BlockMemory(CODED, 8, "cuda:1")
        for make in (partial(BlockSums, memory), partial(Wire, memory, "int8", 64)):
            torch.cuda.set_device(0)
            with pytest.raises(AssertionError):
                make()
            assert not launches
            memory.use_own_stream()
            make()
            assert launches
            launches.clear()
