"""Block memory, codecs and checksums on a simulated GPU, and the order of what threads enqueue there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bench.codec import decode_groups, encode_groups
from cluster.clock import SystemClock
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.model.cuda import uploads
from cluster.model.cuda.step_inputs import StepBuffers, answers_of
from cluster.model.cuda.uploads import Uploads
from cluster.model.kv_format import kv_segments, quantise
from encoder_service.cache import EmbeddingCache
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs import checksum, codec
from kv_transfer.codecs.checksum import BlockSums, checksum_blocks
from kv_transfer.codecs.codec import Codec
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.cuda_device import SimulatedCuda

LAYOUT = MemoryLayout(kv_segments([(2, 16)] * 4, 16, torch.float32))


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda(num_devices=2, orders=True) as simulated:
        yield simulated


def filled(where: str, num_blocks: int = 16) -> BlockMemory:
    memory = BlockMemory(LAYOUT, num_blocks, where)
    generator = torch.Generator().manual_seed(2)
    for segment in memory.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator))
    return memory


def test_blocks_are_copied_read_and_written_as_on_the_cpu(device: SimulatedCuda) -> None:
    memories = [filled("cpu"), filled("cuda")]
    for memory in memories:
        memory.copy_blocks([1, 2], [9, 8])
        memory.write_blocks([4], memory.read_blocks([9]))
    assert torch.equal(memories[1].buffer.cpu(), memories[0].buffer)
    assert np.array_equal(memories[1].read_blocks([4, 8]), memories[0].read_blocks([4, 8]))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_are_the_cpus_bytes(name, device: SimulatedCuda, monkeypatch) -> None:
    """Of plain torch; the launches of our kernels: test_launches.py."""
    monkeypatch.setattr(codec, "has_triton", lambda: False)
    made = Codec(LAYOUT, name, None)
    groups, wire_ids, found = [[0, 3, 5, 1], [8, 9, 2, 4]], [1, 0], []
    for where in ("cpu", "cuda"):
        kv, wire, back = (
            filled(where),
            BlockMemory(made.wire_layout, 2, where),
            BlockMemory(LAYOUT, 16, where),
        )
        encode_groups(made, kv, groups, wire, wire_ids)
        decode_groups(made, wire, wire_ids, back, groups)
        errors = made.relative_error(kv, groups[0], wire, 1, 0).value()
        found.append((wire.buffer.cpu(), back.buffer.cpu(), errors))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-4)


def test_kv_is_quantised_to_the_cpus_codes_and_scales(device: SimulatedCuda) -> None:
    """CUDA multiplies by 1 / 127 where it is told to divide by the number 127."""
    rows = torch.zeros(8, 2, 80)
    half_way = 127 * (1 + (2 * torch.arange(8) + 1) / 2**11)  # between two scales of float16
    rows[:, 0, 3] = torch.nextafter(half_way, torch.tensor(1e4))
    for ours, theirs in zip(quantise(rows.to("cuda")), quantise(rows), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_checksums_of_a_gpus_memory_hold_on_both_sides(device: SimulatedCuda, monkeypatch) -> None:
    """Of plain torch, likewise."""
    monkeypatch.setattr(checksum, "has_triton", lambda: False)
    there, here = filled("cuda"), filled("cpu")
    found, num_syncs = checksum_blocks(there, [3, 1]), device.num_syncs
    assert not found.is_done() and num_syncs == device.num_syncs
    there.synchronize()
    assert found.is_done() and BlockSums(here).match([3, 1], found.value()).value()
    sums = BlockSums(there)
    checks = [sums.match([1, 3], found.value()), sums.match([3, 1], found.value())]
    sums.begin()
    there.synchronize()
    assert [check.value() for check in checks] == [False, True]


def test_embeddings_in_the_encoders_cache_are_there_when_they_are_complete(device: SimulatedCuda) -> None:
    memory = BlockMemory(MemoryLayout((SegmentSpec(16, (32,), torch.float32),)), 8, "cuda")
    cache = EmbeddingCache(memory, BlockPool(8, 16))
    assert cache.try_reserve("a", 20)
    before = memory.mark()
    assert before is not None and not before()
    cache.write("a", 0, torch.ones(20, 32, device="cuda"))
    cache.complete("a", 20)
    assert before()
    assert cache.blocks("a").flatten(0, 1)[:21].sum(1).tolist() == [32.0] * 20 + [0.0]


def test_a_mark_is_reached_when_the_host_has_waited(device: SimulatedCuda) -> None:
    memory = BlockMemory(LAYOUT, 4, "cuda")
    ready = memory.mark()
    assert ready is not None and not ready()
    memory.synchronize()
    assert ready()
    assert BlockMemory(LAYOUT, 4).mark() is None


def test_uploads_are_complete(device: SimulatedCuda) -> None:
    item = {
        "bytes": torch.arange(8, dtype=torch.uint8),
        "sound": torch.randn(4, 8),
        "grid": torch.tensor([[1, 2, 2]]),
    }

    def finish(copies: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert all(copy.is_cuda for copy in copies.values()) and copies["bytes"].dtype == torch.uint8
        return {**copies, "bytes": copies["bytes"].float() / 255}

    uploaded = Uploads(torch.device("cuda"), torch.bfloat16).copy(item, finish)
    dtypes = {name: tensor.dtype for name, tensor in uploaded.items()}
    assert dtypes == {"bytes": torch.bfloat16, "sound": torch.bfloat16, "grid": torch.int64}
    copies: list[Any] = list(uploaded.values())
    for tensor in copies:
        tensor + 1  # by the encoder, on a stream of its own
    assert not device.races


def test_uploads_of_any_size_share_their_pinned_memory(device: SimulatedCuda, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "STAGING_BYTES", 64)
    copies, num_pinned = uploads.Uploads(torch.device("cuda"), torch.float32), len(device.pinned)
    assert num_pinned == 1
    items = [{"sound": torch.randn(size, 5).t(), "grid": torch.arange(size)} for size in (1, 8, 40)]
    items.append({"sound": torch.zeros(0, 5), "grid": torch.tensor(7)})
    with ThreadPoolExecutor(2) as threads:

        def copied(item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            with device.on_thread():
                return {name: there.cpu() for name, there in copies.copy(item, dict).items()}

        for item, found in zip(items, threads.map(copied, items), strict=True):
            assert all(torch.equal(found[name], item[name]) for name in item)
    assert len(device.pinned) == num_pinned


def test_the_sanitizer_sees_a_missing_wait(device: SimulatedCuda) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.ones(4, device="cuda") * 2
    made + 1
    assert device.races


def test_pinned_memory_that_is_written_to_too_early_is_noticed(device: SimulatedCuda) -> None:
    pinned, there = torch.zeros(4, pin_memory=True), torch.zeros(4, device="cuda")
    copied: Any = torch.cuda.Event()
    for is_early in (False, True):
        there.copy_(pinned, non_blocking=True)
        copied.record()
        if is_early:
            pinned[1] = 7.0
            with pytest.raises(RuntimeError, match="before the device had copied it"):
                copied.synchronize()
        else:
            copied.synchronize()
            pinned[1] = 5.0


def test_a_steps_inputs_are_not_overwritten_before_they_are_copied(
    device: SimulatedCuda, monkeypatch
) -> None:
    tensors: list[torch.Tensor] = []
    events: list[Any] = []
    for module, name, made in ((torch, "zeros", tensors), (torch.cuda, "Event", events)):
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, m=make, to=made, **options: to.append(m(*args, **options)) or to[-1]
        )
    buffers = StepBuffers(answers_of(4), 8, 1, 16, 63, torch.device("cuda"))
    (copied,) = events
    assert [tensor.is_pinned() for tensor in tensors if not tensor.is_cuda] == [True]
    for step in range(3):
        inputs = buffers.fill_answers(answers_of(2), [1], [5 + step], [0], [[0]])
        assert copied.num_waits == step + 1 and not copied.query()
    assert inputs.step.contexts.tolist() == [8, 1]


def test_bytes_are_moved_on_a_stream_and_the_device_of_their_memory(device: SimulatedCuda) -> None:
    """Not behind the model's steps, and in a rank above 0 not on GPU 0, where a kernel could not read
    them."""
    seen: list[tuple[int, Any]] = []
    stepped = threading.Event()

    class Engine(TransferEngine):
        def step(self) -> bool:
            seen.append((torch.cuda.current_device(), torch.cuda.current_stream()))
            stepped.set()
            return super().step()

    memory = BlockMemory(LAYOUT, 4, "cuda:1")
    agent = InProcessNetwork().agent("a")
    agent.register = lambda memory: None  # it holds CPU memory only
    engine = Engine(agent, SystemClock(), lambda event: None, outgoing=memory)
    engine.start()
    try:
        assert stepped.wait(60)
    finally:
        engine.close(0.0)
    (index, stream), *_ = seen
    assert index == 1 and stream.index == 1 and stream is not device.default[1]
    assert torch.cuda.current_device() == 0
