"""The model layer on a simulated GPU: the same numbers as on the CPU, no tensor on the wrong device, and
decode steps that can be recorded."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from bench.trusted_media import trusted_decoders
from cluster.kvcache.memory import BlockMemory
from cluster.model import attention_torch
from cluster.model.attention import PagedBatch
from cluster.model.cuda import paged_attention
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, capture_cuda, recording_of
from cluster.model.cuda.step_inputs import answers_of
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from cluster.model.sampling import sample
from cluster.types.media import MediaOptions
from cluster.types.request import SamplingParams
from encoder_service.runner import EncoderRunner, Piece, Prepared
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.plain_attention import PlainAttention
from tests.fakes.slow_params import often
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.gpu.cases import check_recorded_steps

PROMPTS = [list(range(5, 45)), list(range(50, 53)), list(range(60, 81))]
TABLES = [list(range(16 * i, 16 * i + 16)) for i in range(3)]
NUM_STEPS = 3
ANSWERS = RecordedSizes([answers_of(4)], [])  # with room to spare; several sizes: `test_recorded_steps`


def computed(model: LanguageModel, where: str, decode_by=None) -> list[Tensor]:
    """Logits of prompts side by side, of the rest of one beside running answers, and of some decode steps."""
    kv = BlockMemory(model.kv_layout, 65, where)  # the last one is written by padding
    steps = model if decode_by is None else decode_by(model, kv)
    first = [SequenceChunk(PROMPTS[i], 0, 0, TABLES[i]) for i in (1, 2)]
    first.append(SequenceChunk(PROMPTS[0][:20], 0, 0, TABLES[0], num_logits=0))
    logits = [steps.forward(first, kv)]
    mixed = [SequenceChunk([7], 3, 3, TABLES[1]), SequenceChunk(PROMPTS[0][20:], 20, 20, TABLES[0])]
    logits.append(steps.forward([*mixed, SequenceChunk([7, 8], 21, 21, TABLES[2], num_logits=2)], kv))
    steps.copy_blocks([TABLES[0][0]], [63], kv)
    tables = [[63, *TABLES[0][1:]], TABLES[1]]
    for step in range(NUM_STEPS):
        logits.append(steps.decode([9, 10], [40 + step, 4 + step], [0, 0], tables, kv).clone())
    return [each.cpu() for each in logits]


def check_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class PlacesOfDecoder:
    """Implements `WholeDecoder`: notes where its arguments lie."""

    kernels_s = None

    def __init__(self) -> None:
        self.places: set[str] = set()

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        self.places |= {each.device.type for each in (embeds, positions, wanted, batch.slots)}
        return torch.zeros(len(wanted), 2, device="cuda")


def test_layers_that_are_fused_whole_get_all_of_a_step_on_the_device(device: SimulatedCuda) -> None:
    """Unrecorded steps, too: chunks of prompts and answers."""
    hf_model = TEXT_FAMILIES["llama"]().model.eval()
    decoder = PlacesOfDecoder()
    model = LanguageModel(replace(probed_parts(device.put(hf_model), 16, "auto"), decoder=decoder))
    computed(model, "cuda")
    assert decoder.places == {"cuda"}


# experts; ids that are read as token 0; layers with unlike numbers of heads. Windows: the next test
QUICK = ("qwen3_moe", "step3p7")
MODELS = {**TEXT_FAMILIES, **MEDIA_FAMILIES}


@pytest.mark.parametrize(
    "name",
    often(sorted(MODELS), QUICK),
)
def test_a_language_model_gives_the_cpus_logits(name: str, device: SimulatedCuda) -> None:
    whole = MODELS[name]().model
    expected = computed(LanguageModel.from_model(copy.deepcopy(whole)), "cpu")
    model = LanguageModel.from_model(device.put(whole))
    assert model.device == torch.device("cuda", 0)
    check_equal(computed(model, "cuda"), expected, 1e-4)


@pytest.mark.parametrize("name", ["gpt_oss_sinks_window", "gemma3_window"])
def test_prompts_in_slices_give_the_cpus_logits(name: str, device: SimulatedCuda, monkeypatch) -> None:
    whole = MODELS[name]().model
    expected = computed(LanguageModel.from_model(copy.deepcopy(whole)), "cpu")
    monkeypatch.setattr(attention_torch, "SCORE_BYTES", 5_000)
    check_equal(computed(LanguageModel.from_model(device.put(whole)), "cuda"), expected, 1e-4)


def qwen2(dtype: torch.dtype = torch.float32) -> hf.Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, eos_token_id=None,
    )  # fmt: skip
    model = hf.Qwen2ForCausalLM(config)
    nn.Module.to(model, dtype)
    return model


def graphed(model: LanguageModel, kv: BlockMemory) -> GraphedModel:
    made = GraphedModel(model, kv, ANSWERS, capture_cuda())
    made.warm_up()
    return made


@pytest.fixture
def kernels(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> PlainAttention:
    return PlainAttention(device, monkeypatch)


def test_recorded_decode_steps_equal_unrecorded_ones(device: SimulatedCuda) -> None:
    """In a recording, a read on the host, a copy between the memories or a wait is an error."""
    model = LanguageModel.from_model(device.put(qwen2()))
    check_equal(computed(model, "cuda", graphed), computed(model, "cuda"), 1e-5)


def test_an_unrecorded_step_is_copied_at_once_and_waits_for_nothing(
    device: SimulatedCuda, kernels: PlainAttention
) -> None:
    model = LanguageModel.from_model(device.put(qwen2(torch.bfloat16)))
    kv = BlockMemory(model.kv_layout, 64, "cuda")
    chunks = [SequenceChunk(PROMPTS[i], 0, 0, TABLES[i]) for i in range(3)]
    for step in (
        lambda: model.forward(chunks, kv),
        lambda: model.decode([9, 10], [40, 4], [0, 0], TABLES[:2], kv),
    ):
        num_syncs, crosses = device.num_syncs, device.crosses
        with mock.patch.object(device, "crosses", wraps=crosses) as copies:
            step()
        assert [call.args for call in copies.call_args_list] == [(True,)]
        assert device.num_syncs == num_syncs


KERNEL_TYPES = [
    (kv, *dtype) for kv in ("auto", "int8") for dtype in ((torch.bfloat16, 0.1), (torch.float32, 1e-4))
]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "tolerance"),
    often(KERNEL_TYPES, [("auto", torch.bfloat16, 0.1), ("int8", torch.float32, 1e-4)]),
)
def test_our_kernels_serve_all_steps_recorded_or_not(
    kv_cache_dtype, dtype, tolerance: float, device, kernels: PlainAttention
) -> None:
    whole = qwen2(dtype)
    expected = computed(LanguageModel.from_model(copy.deepcopy(whole), kv_cache_dtype=kv_cache_dtype), "cpu")
    model = LanguageModel.from_model(device.put(whole), kv_cache_dtype=kv_cache_dtype)
    kernels.num_attended = 0
    check_equal(computed(model, "cuda"), expected, tolerance)
    assert kernels.num_attended == 2 * (2 + NUM_STEPS)  # two layers
    check_equal(computed(model, "cuda", graphed), expected, tolerance)


@pytest.mark.parametrize("name", ["gpt_oss_sinks_window", "step3p7"])
def test_windows_sinks_and_unlike_layers_are_served_by_our_kernels(name, device, kernels) -> None:
    whole = MODELS[name]().model
    expected = computed(LanguageModel.from_model(copy.deepcopy(whole)), "cpu")
    check_equal(computed(LanguageModel.from_model(device.put(whole)), "cuda"), expected, 1e-4)
    assert kernels.num_attended


def test_what_is_tried_on_a_gpu_holds_on_the_simulated_one(device, kernels: PlainAttention) -> None:
    model = LanguageModel.from_model(device.put(qwen2(torch.bfloat16)))
    check_recorded_steps(model, num_steps=2, tolerance=0.1, mixed=False)


def test_a_worker_records_steps_whose_kernels_need_no_host(device, kernels: PlainAttention) -> None:
    model = LanguageModel.from_model(device.put(qwen2(torch.bfloat16)))

    def recorded(model: LanguageModel, kv: BlockMemory) -> GraphedModel:
        recording = recording_of(model, ANSWERS)
        assert recording is not None
        steps = recording.over(model, kv)
        assert isinstance(steps, GraphedModel)
        return steps

    check_equal(computed(model, "cuda", recorded), computed(model, "cuda"), 0.1)


def test_steps_that_cannot_be_recorded_after_all_run_unrecorded(device, kernels, monkeypatch, caplog) -> None:
    """A kernel that asks the host is found before the first recording begins: torch does not recover from one
    that fails."""

    def asks(query, cache, layer, step, *others) -> Tensor:
        step.contexts.tolist()
        return kernels.attend(query, cache, layer, step, *others)

    model = LanguageModel.from_model(device.put(qwen2(torch.bfloat16)))
    expected = computed(model, "cuda")
    monkeypatch.setattr(paged_attention, "attend", asks)
    monkeypatch.setattr(torch.cuda, "graph", None)
    assert recording_of(model, ANSWERS) is None
    assert "steps cannot be recorded: called a synchronizing CUDA operation" in caplog.text
    assert torch.cuda.get_sync_debug_mode() == 0
    check_equal(computed(model, "cuda"), expected, 0.1)


def test_a_step_reads_the_device_only_to_tell_its_logits(device: SimulatedCuda) -> None:
    model = LanguageModel.from_model(device.put(qwen2()))
    kv = BlockMemory(model.kv_layout, 64, "cuda")
    steps = graphed(model, kv)
    steps.decode([9, 10], [40, 4], [0, 0], TABLES[:2], kv)
    before = device.num_syncs
    logits = steps.decode([9, 10], [41, 5], [0, 0], TABLES[:2], kv)
    assert device.num_syncs - before == 1  # for the previous step's inputs, which have long been copied
    before = device.num_syncs
    sample(logits, [SamplingParams()] * 2, [42, 6])
    assert device.num_syncs - before == 1


# packed, tiled, masked, sound; those that ask the host for sizes
QUICK_ENCODERS = ("qwen2_5_omni", "llava_onevision", "qwen3_vl", "aria", "qwen3_asr", "mistral3")


@pytest.mark.parametrize(
    "name",
    often(MEDIA_FAMILIES, QUICK_ENCODERS),
)
def test_an_encoder_gives_the_cpus_rows(name: str, device: SimulatedCuda) -> None:
    case = MEDIA_FAMILIES[name]()
    items = [one for request in case.requests for one in request.items]
    on_cpu = EncoderModel.from_model(copy.deepcopy(case.model))
    on_gpu = EncoderModel.from_model(device.put(case.model))

    for modality, item in items:
        with ThreadPoolExecutor(1) as thread:
            uploaded = thread.submit(in_context, device, on_gpu.upload, item).result()
        assert {tensor.device.type for tensor in uploaded.values()} == {"cuda"}
        (rows,), (expected,) = on_gpu.encode(modality, [uploaded]), on_cpu.encode(modality, [item])
        torch.testing.assert_close(rows.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl"])
def test_an_encoder_call_ends_when_the_device_has_computed_it(name: str, device: SimulatedCuda) -> None:
    """Else the call's time is that of its launches, and estimates of calls follow it."""
    case = MEDIA_FAMILIES[name]()
    encoder = EncoderModel.from_model(device.put(case.model))
    runner = EncoderRunner(encoder, None, None)  # type: ignore[arg-type]  # nothing is prepared here
    modality, item = case.requests[0].items[0]
    with ThreadPoolExecutor(1) as thread:
        prepared = Prepared(thread.submit(in_context, device, encoder.upload, item).result(), 1)
    launched = torch.cuda.Event()
    encode = encoder.encode

    def then_marked(*args):
        rows = encode(*args)
        launched.record()
        return rows

    encoder.encode = then_marked  # type: ignore[method-assign]
    stream: Any = torch.cuda.Stream()  # of the encoder's thread
    with torch.cuda.stream(stream):
        runner.encode(modality, [Piece(prepared, MediaOptions(), 0, 1)])
    assert launched.query()
    uploaded: list[Any] = list(prepared.tensors.values())  # by another stream, whose memory they have
    assert all(stream.number in device.recorded[tensor.held.data_ptr()] for tensor in uploaded)


def test_what_is_prepared_does_not_wait_for_the_model(device: SimulatedCuda, monkeypatch) -> None:
    """The grid, too, is read on the stream that copies it: the model's is busy."""
    case = MEDIA_FAMILIES["qwen2_5_vl"]()
    encoder = EncoderModel.from_model(device.put(case.model))
    modality, item = case.requests[0].items[0]
    processor: Any = SimpleNamespace(begin=lambda *_, **__: item, finish=lambda _modality, begun: begun)
    found: list[tuple[str, int]] = []
    sync = device.sync
    monkeypatch.setattr(
        device, "sync", lambda why: found.append((why, device.current_stream().number)) or sync(why)
    )
    prepare = EncoderRunner(encoder, processor, trusted_decoders()).preprocess
    with ThreadPoolExecutor(1) as thread:
        array, options = np.zeros(1), MediaOptions()
        prepared = thread.submit(in_context, device, prepare, modality, array, options).result()
    assert prepared.num_units == int(next(v for k, v in item.items() if k.endswith("grid_thw"))[0, 0])
    reads = [number for why, number in found if why == "a tensor is read on the host"]
    assert reads and device.default[0].number not in reads


def in_context(device: SimulatedCuda, function, *args):
    with device.on_thread():
        return function(*args)


def test_a_recording_that_fails_leaves_the_stream_as_it_was(device: SimulatedCuda, monkeypatch) -> None:
    """torch's context manager does not, where ending the recording fails."""

    class Failing:
        def __init__(self, graph, **_):
            pass

        def __enter__(self) -> None:
            torch.cuda.set_stream(torch.cuda.Stream())

        def __exit__(self, *_) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", Failing)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="during capture"):
        capture_cuda()(lambda: torch.zeros(1, device="cuda"))
    assert torch.cuda.current_stream() is before
