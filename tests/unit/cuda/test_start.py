"""What a worker does on a simulated GPU before its first request: settings, memory, weights, recorded steps,
coded KV, the other ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from cluster.config import machine
from cluster.config.settings import REPOSITORY, ClusterArgs, DecodeArgs, TransferArgs
from cluster.engine.runner import LanguageRunner
from cluster.errors import ConfigError
from cluster.model import language_parts, loading, parallel
from cluster.model.cuda import graphs
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, capture_cuda, recording_of
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel
from cluster.types.members import Role
from cluster.worker.language import LanguageSizes, load_language
from cluster.worker.memory_plan import LIBRARIES_PART, available_bytes
from cluster.worker.process import hardware_of
from cluster.worker.setup import WorkerSetup, set_up
from encoder_service.service import MAX_BATCH_ROWS, MAX_PIECE_ROWS, Encoder
from kv_transfer.agents import transport_probe
from kv_transfer.agents.transport_probe import check_shareable
from kv_transfer.codecs import codec
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.flow.tiny_media_models import MEDIA_FAMILIES

SIZES = LanguageSizes(
    num_kv_blocks=32, memory_share=0.9, feature_bytes=0, max_step_tokens=64, max_step_sequences=2
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    with SimulatedCuda(num_devices=2) as simulated:
        to = hf.PreTrainedModel.to

        def moved(model: hf.PreTrainedModel, *args):
            place = torch.device(args[0])
            return simulated.put(model, place.index or 0) if place.type == "cuda" else to(model, *args)

        monkeypatch.setattr(hf.PreTrainedModel, "to", moved)
        monkeypatch.setattr(codec, "has_triton", lambda: False)
        yield simulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    hf.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def setup_of(args: ClusterArgs) -> WorkerSetup:
    return set_up(args, "replica")


@pytest.mark.parametrize("wire", ["raw", "int8"])
def test_a_worker_loads_records_and_runs_its_model(
    folder: Path, wire: Any, device: SimulatedCuda, monkeypatch
) -> None:
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32", transfer=TransferArgs(codec=wire))
    setup = setup_of(args)
    assert setup.device.type == "cuda" and setup.cpu_slots_folder is None
    language = load_language(args, setup, Role.LANGUAGE, SIZES)
    assert language.kv.num_blocks == SIZES.num_kv_blocks  # plain torch serves float32: no step is recorded
    assert (language.wire is None) == (wire == "raw")
    kv = language.kv
    graphed = GraphedModel(language.model, kv, RecordedSizes.up_to(2, 0), capture_cuda())
    graphed.warm_up()
    no_features: Any = None
    runner = LanguageRunner(language.model, graphed, kv, no_features)
    drawn = []
    monkeypatch.setattr(
        "cluster.engine.runner.sample", lambda *given: drawn.append((given[1][0].top_k > 0, len(given[1])))
    )
    runner.warm_up_prompt(20, [0, 1])  # all that a worker without answers does
    assert drawn == [(False, 1), (True, 1)], "the first request waits for kernels that draw"
    runner.warm_up_answers(2, 20, [0, 1])
    assert drawn[2:] == [(False, 2), (True, 2)]
    assert runner.run([], lambda layer, ready: None) == []


def test_kv_fills_the_share_of_the_gpu(folder: Path, device: SimulatedCuda, monkeypatch) -> None:
    total = 32 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32")
    sizes = replace(SIZES, num_kv_blocks=None, memory_share=0.5)
    language = load_language(args, setup_of(args), Role.LANGUAGE, sizes)
    assert language.kv.num_blocks == language.num_kv_blocks
    kv_bytes = language.kv.num_blocks * language.model.kv_layout.block_bytes
    assert 0.45 * total < kv_bytes + language.model.weight_bytes <= 0.5 * total


def test_kv_leaves_room_for_all_that_comes_later(folder: Path, device: SimulatedCuda, monkeypatch) -> None:
    """What the largest step has taken (estimates say less), calls of an encoder, libraries; of the share, and
    of what others have left."""
    mib = 1 << 20
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 8 * mib)
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32")
    sizes = replace(SIZES, num_kv_blocks=None, memory_share=0.5, encoder_bytes=4 * mib)
    for free, may_take in ((64, 32), (24, 24)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None, free=free: (free * mib, 64 * mib))
        language = load_language(args, setup_of(args), Role.LANGUAGE, sizes)
        block_bytes = language.model.kv_layout.block_bytes
        weights = language.model.weight_bytes if free == 64 else 0  # the others' 40 MiB are not free
        room = (may_take - 8 - 4 - 64 // LIBRARIES_PART) * mib - weights
        assert room - block_bytes < language.num_kv_blocks * block_bytes <= room


def test_a_worker_whose_largest_step_finds_no_memory_does_not_start(folder, device, monkeypatch) -> None:
    forward = LanguageModel.forward

    def tried(model: LanguageModel, chunks: Any, kv: Any, *rest: Any) -> Any:
        if kv.num_blocks == SIZES.num_kv_blocks:  # all memory is allocated
            raise torch.OutOfMemoryError
        return forward(model, chunks, kv, *rest)

    monkeypatch.setattr(LanguageModel, "forward", tried)
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match=r"largest step .* no memory(.|\n)*weights"):
        load_language(args, setup_of(args), Role.LANGUAGE, SIZES)


@pytest.mark.parametrize(("num_kv_blocks", "memory_share"), [(32, 0.9), (None, 0.001)])
def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    num_kv_blocks, memory_share, folder, device, monkeypatch
) -> None:
    """Of a small card, and of a small share of one."""
    total = 40 << 10 if num_kv_blocks else 40 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(loading, "move_weights", lambda *_, **__: pytest.fail("weights were read"))
    sizes = replace(SIZES, num_kv_blocks=num_kv_blocks, memory_share=memory_share)
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match=r"weights .* \(at least\)(.|\n)*wanted(.|\n)*available"):
        load_language(args, setup_of(args), Role.LANGUAGE, sizes)


@pytest.mark.parametrize("role", [Role.LANGUAGE, Role.DECODE, Role.PREFILL])
def test_what_graphs_take_is_known_before_kv_is_sized(role, folder, device, monkeypatch, caplog) -> None:
    total, reserved = 64 << 20, iter([0, 0, 3 << 20])  # asked before weights are read, too
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: next(reserved, 0))
    monkeypatch.setattr(language_parts, "make_backend", lambda *_: RecordedAttention())
    monkeypatch.setattr(graphs, "GRAPH_BYTES", 1 << 20)
    caplog.set_level("INFO")
    decode = DecodeArgs(max_batch_sequences=2)
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32", decode=decode)
    sizes = replace(SIZES, num_kv_blocks=None, memory_share=0.5, max_step_tokens=20)
    language = load_language(args, setup_of(args), role, sizes)
    assert isinstance(language.steps, GraphedModel)
    assert language.kv.num_blocks == language.num_kv_blocks + 1
    num_graphs = 2 + 2 * role.decodes  # 16 and 32 tokens; answers of 1 and 2
    graph_bytes = (3 << 20) + num_graphs * (1 << 20)
    assert f"recorded steps            {3 + num_graphs}.0 MiB" in caplog.text
    kv_bytes = language.kv.num_blocks * language.model.kv_layout.block_bytes
    assert 0.45 * total < kv_bytes + language.model.weight_bytes + graph_bytes <= 0.5 * total


def test_a_rank_loads_onto_the_gpu_of_its_group(folder: Path, device: SimulatedCuda) -> None:
    args = ClusterArgs(model=str(folder), device="cuda", dtype="float32")
    group = parallel.ParallelGroup(rank=0, size=1, device=torch.device("cuda", 1))
    torch.cuda.set_device(1)  # as `join_group` does
    try:
        language = load_language(args, setup_of(args), Role.DECODE, SIZES, group)
    finally:
        torch.cuda.set_device(0)
    assert language.model.device == language.kv.buffer.device == group.device


def test_a_worker_that_asks_for_cuda_does_not_start_without(folder: Path) -> None:
    with pytest.raises(ConfigError, match="asks for CUDA, but this replica sees no GPU"):
        setup_of(ClusterArgs(model=str(folder), device="cuda"))


@pytest.mark.parametrize(("dtype", "allows"), [("float32", False), ("bfloat16", True)])
def test_float32_on_a_gpu_is_not_tf32(dtype: Any, allows: bool, folder: Path, device: SimulatedCuda) -> None:
    switches: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        setup_of(ClusterArgs(model=str(folder), device="cuda", dtype=dtype))
        assert [switch.allow_tf32 for switch in switches] == [allows, allows]
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


def test_auto_takes_bfloat16_on_a_gpu(folder: Path, device: SimulatedCuda) -> None:
    setup = setup_of(ClusterArgs(model=str(folder)))
    assert (setup.device.type, setup.dtype) == ("cuda", torch.bfloat16)


def test_steps_whose_attention_reads_the_host_are_not_recorded(folder: Path, device: SimulatedCuda) -> None:
    model = LanguageModel.load(folder, dtype=torch.float32, device="cuda")
    assert recording_of(model, RecordedSizes.up_to(2, 64)) is None


def test_an_encoder_is_loaded_with_a_stream_for_uploads(tmp_path: Path, device: SimulatedCuda) -> None:
    MEDIA_FAMILIES["qwen2_5_vl"]().model.save_pretrained(tmp_path)
    encoder = EncoderModel.load(tmp_path, dtype=torch.float32, device="cuda")
    assert encoder.device == torch.device("cuda", 0)
    streams: list[Any] = []
    item = {"pixel_values": torch.randn(4, 8)}
    uploaded = encoder.upload(item, lambda item: streams.append(torch.cuda.current_stream()) or item)
    assert uploaded["pixel_values"].is_cuda and streams[0] is not device.default[0]


@pytest.mark.parametrize("total", [1 << 26, 1 << 34])
def test_an_encoder_tells_what_its_calls_will_take(total: int, device: SimulatedCuda, monkeypatch) -> None:
    """KV of the same process leaves them that much, and fills the rest."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 34, total))
    args = ClusterArgs(model=str(REPOSITORY / "deploy" / "demo_model"), device="cuda", dtype="float32")
    encoder = Encoder.load(args, setup_of(args))
    assert encoder is not None
    limits, recorded = encoder.limits, encoder.model.recorded_bytes(encoder.limits.row_bytes)
    assert encoder.call_bytes == limits.max_call_bytes + args.encode.max_prepared_bytes + recorded
    rows = limits.max_call_bytes // limits.row_bytes
    assert rows == (MAX_PIECE_ROWS if total == 1 << 26 else MAX_BATCH_ROWS)


def test_memory_and_name_are_asked_of_the_device(device: SimulatedCuda) -> None:
    assert available_bytes(torch.device("cuda")) == 1 << 34
    assert "simulated" in hardware_of(torch.device("cuda"), num_ranks=2)


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3)])
def test_a_rank_computes_on_its_own_gpu(rank: int, size: int, device, monkeypatch, tmp_path: Path) -> None:
    joined: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(parallel, "tell_local_rank", lambda rank: None)
    if size > 2:
        with pytest.raises(ConfigError, match="sees 2"):
            parallel.join_group(rank, size, tmp_path / "meeting", "cuda")
        return
    group = parallel.join_group(rank, size, tmp_path / "meeting", "cuda")
    assert joined == ["nccl"] and group.device == torch.device("cuda", 1)
    assert torch.zeros(1, device="cuda").device == group.device
    torch.cuda.set_device(0)


@pytest.mark.parametrize(
    ("module", "compiler", "expected"), [(True, "gcc", True), (True, None, False), (False, "gcc", False)]
)
def test_triton_is_used_only_with_the_compiler_that_it_calls(module, compiler, expected, monkeypatch) -> None:
    """Without one its first launch fails, in a worker that has loaded its model."""
    monkeypatch.setattr(machine, "find_spec", lambda name: module or None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: compiler if name == compiler else None)
    machine.can_run_triton.cache_clear()
    try:
        assert machine.has_triton() is expected
    finally:
        machine.can_run_triton.cache_clear()


def test_the_setting_switches_our_kernels_off_and_on_again(monkeypatch) -> None:
    """All that has a Triton kernel asks `has_triton`, and computes by torch without it."""
    monkeypatch.setattr(machine, "can_run_triton", lambda: True)
    try:
        for kernels, expected in (("none", False), ("auto", True)):
            set_up(ClusterArgs.model_validate({"gpu_kernels": kernels}), "w", transport="in_process")
            assert machine.has_triton() is expected
    finally:
        machine.select_gpu_kernels("auto")


class Driver:
    """libcuda's answer about one address."""

    def __init__(self, status: int, is_shareable: int):
        self._answer = status, is_shareable

    def cuPointerGetAttribute(self, out, attribute: int, address: ctypes.c_uint64) -> int:
        assert (attribute, address.value) == (10, 0x7F00)
        status, out._obj.value = self._answer
        return status


def test_memory_that_other_processes_cannot_open_is_refused_by_name() -> None:
    assert check_shareable(0x7F00, Driver(0, 1)) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expandable_segments"):
        check_shareable(0x7F00, Driver(0, 0))  # type: ignore[arg-type]
    with pytest.raises(transport_probe.TransferError, match="error 1"):
        check_shareable(0x7F00, Driver(1, 0))  # type: ignore[arg-type]
