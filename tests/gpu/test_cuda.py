"""The GPU path on a GPU: our kernels and libraries against a plain softmax, recorded decode steps against
unrecorded ones."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn

from bench.codec import decode_groups, encode_groups
from cluster.config.machine import has_triton
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model import attention_cuda
from cluster.model.attention import AttentionShape, LayerAttention
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.choice import choose
from cluster.model.cuda.layer_calls import write_rows
from cluster.model.cuda.libraries import installed
from cluster.model.encoder import EncoderModel
from cluster.model.kv_format import kv_segments, layer_cache
from cluster.model.language import LanguageModel
from kv_transfer.codecs.checksum import BlockSums, checksum_blocks
from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.quantisation import CODECS
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.gpu.cases import Heads, check_recorded_steps, paged_case
from tests.unit.model.attention_cases import Shape, Spans, Step, dense, make_step, run

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton or its C compiler is not installed")
DEVICE = "cuda"
HEADS = [(28, 4, 128, 128), (14, 2, 64, 64), (8, 8, 80, 80), (8, 1, 256, 256), (16, 1, 192, 128)]
# The compiler makes kernels for each of these, which takes most of the time.
KINDS = [
    *((heads, torch.bfloat16, kv) for kv in ("auto", "int8") for heads in HEADS),
    *((heads, torch.float32, kv) for kv in ("auto", "int8") for heads in (HEADS[0], HEADS[-1])),
    (HEADS[2], torch.float16, "int8"),
]
MIXES = {
    "prompts": [(0, 300), (0, 70)],
    "chunks": [(500, 200), (0, 33)],
    "answers": [(0, 1), (777, 1), (2000, 1)],
    "mixed": [(5000, 1), (700, 1), (300, 40), (0, 130), (900, 5)],
}
LAYERS = {
    "causal": LayerAttention(0.1),
    "window": LayerAttention(0.1, sliding_window=100),
    "sinks": LayerAttention(0.1, sliding_window=1000, softcap=20.0, sinks=torch.linspace(-1, 1, 28)),
}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}


def backend() -> CudaAttention:
    return CudaAttention(TorchAttention(), torch.cuda.get_device_properties(DEVICE).multi_processor_count)


def on_gpu(step: Step) -> Step:
    kv = BlockMemory(step.batch.kv.layout, step.batch.kv.num_blocks, DEVICE)
    kv.buffer.copy_(step.batch.kv.buffer)
    names = ("slots", "block_tables", "context_lens_tensor")
    moved = {name: getattr(step.batch, name).to(DEVICE) for name in names}
    rows = {name: getattr(step, name).to(DEVICE) for name in ("query", "key", "value")}
    return replace(step, batch=replace(step.batch, kv=kv, **moved), cache=layer_cache(kv, 0), **rows)


@needs_triton
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("heads", "dtype", "kv_cache_dtype"), KINDS)
def test_our_kernels_equal_dense_attention(mix: str, name: str, heads, dtype, kv_cache_dtype) -> None:
    layer = LAYERS[name]
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks[: heads[0]])
    shape = Shape(*heads, block_size=16, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    seen = {"mixed": Spans.EVERYWHERE, "prompts": Spans.WITH_WINDOW}.get(mix, Spans.NONE)
    step = make_step(shape, MIXES[mix], seen)
    expected = dense(shape, step, layer)
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.to(DEVICE, dtype))
    out = run(backend(), on_gpu(step), layer).cpu().float()
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@needs_triton
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_row_has_the_same_bits_alone_and_in_company(kv_cache_dtype) -> None:
    shape = Shape(28, 4, 128, 128, block_size=16, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    together = on_gpu(make_step(shape, MIXES["mixed"]))
    out, first = run(backend(), together, LAYERS["causal"]), 0
    batch = together.batch
    for i, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        own = slice(first, first + new)
        alone = replace(
            batch, slots=batch.slots[own], query_lens=[new], context_lens=[context],
            block_tables=batch.block_tables[i : i + 1], bidirectional_spans=[()], memo={},
        )  # fmt: skip
        rows = (together.query[own], together.key[own], together.value[own])
        step = Step(alone, together.cache, *rows, together.contexts)
        assert torch.equal(run(backend(), step, LAYERS["causal"]), out[own])
        first += new


@pytest.mark.parametrize(("name", "library"), installed(), ids=lambda each: str(each)[:12])
@pytest.mark.parametrize("mix", ["prompts", "chunks"])
@pytest.mark.parametrize("layer", [LAYERS["causal"], LAYERS["window"]])
@pytest.mark.parametrize("heads", HEADS[:4])
@pytest.mark.parametrize("block_size", [16, 256])
def test_every_library_equals_dense_attention(
    name, library, mix, layer, heads, block_size, monkeypatch
) -> None:
    monkeypatch.setattr(attention_cuda, "LONG_STEP", 1)
    case = paged_case(
        MIXES[mix], layer, Heads(*heads), block_size=block_size, dtype=torch.bfloat16, device=DEVICE
    )
    subject = CudaAttention(TorchAttention(), 100, library)
    out = subject.attend(case.batch, layer, case.query, case.new_key, case.new_value, case.cache)
    torch.testing.assert_close(out.float(), case.expected, rtol=2e-2, atol=2e-2)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_rows_of_modules_are_written_as_by_the_cache_itself(dtype, kv_cache_dtype) -> None:
    heads = Heads(4, 4, 128, 80)
    case = paged_case(
        [(10, 90)], LAYERS["causal"], heads, kv_cache_dtype=kv_cache_dtype, dtype=dtype, device=DEVICE
    )
    expected = case.batch.kv.buffer.clone()
    case.batch.kv.segments[0].flatten(0, 1)[case.batch.slots] = 9
    case.batch.kv.segments[-1].flatten(0, 1)[case.batch.slots] = 9
    key, value = (
        rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (case.new_key, case.new_value)
    )
    write_rows(key, value, case.batch.slots, case.cache)
    assert torch.equal(case.batch.kv.buffer, expected)


@needs_triton
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_recorded_decode_steps_equal_unrecorded_ones(kv_cache_dtype) -> None:
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, eos_token_id=None,
    )  # fmt: skip
    hf_model = hf.Qwen2ForCausalLM(config)
    nn.Module.to(hf_model, DEVICE, torch.bfloat16)
    model = LanguageModel.from_model(hf_model, kv_cache_dtype=kv_cache_dtype)
    check_recorded_steps(model, num_steps=60, tolerance=0.1)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_on_the_gpu_gets_our_kernels(dtype) -> None:
    layout = MemoryLayout(kv_segments([(4, 128)] * 2, 16, dtype))
    shape = AttentionShape(layout, 16, 28, LayerAttention(128**-0.5))
    assert isinstance(choose(torch.device(DEVICE, 0), dtype, shape, TorchAttention()), CudaAttention)


def test_a_gpu_and_a_cpu_find_the_same_checksum_for_the_same_bytes() -> None:
    layout = MemoryLayout(kv_segments([(2, 64)] * 4, 16, torch.bfloat16))
    here, there = BlockMemory(layout, 8), BlockMemory(layout, 8, DEVICE)
    for segment in here.segments:
        segment.normal_()
    there.buffer.copy_(here.buffer)
    pending = checksum_blocks(there, [3, 1, 6])
    there.synchronize()
    sent = pending.value()
    assert pending.is_done() and BlockSums(here).match([3, 1, 6], sent).value()
    sums = BlockSums(there)
    checks = [sums.match(ids, sent) for ids in ([3, 1, 6], [1, 3, 6])]
    sums.begin()
    there.synchronize()
    assert [check.value() for check in checks] == [True, False]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_codes_the_bytes_of_the_cpu_and_decodes_them_alike(name, dtype) -> None:
    layout = MemoryLayout(kv_segments([(2, 80), (2, 64), (1, 130), (3, 24)], 16, dtype))
    codec = Codec(layout, name)
    here, there = BlockMemory(layout, 12), BlockMemory(layout, 12, DEVICE)
    for segment in here.segments:
        segment.normal_()
        segment[2] *= 1e-7
        segment[5] *= 1e4
        segment[:, 3, 0] = 0
    there.buffer.copy_(here.buffer)
    groups, wire_ids = [[7, 0, 3, 8], [1, 2, 5, 6]], [2, 0]
    found = []
    for kv in (here, there):
        wire, back = kv.beside(codec.wire_layout, 3), kv.beside(layout, 12)
        encode_groups(codec, kv, groups, wire, wire_ids)
        decode_groups(codec, wire, wire_ids, back, groups)
        found.append((wire.buffer.cpu(), back.buffer.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["qwen2_5_omni", "llava_onevision", "qwen3_vl"])
def test_an_encoder_on_the_gpu_gives_the_rows_of_one_on_the_cpu(name) -> None:
    """Tensors are uploaded by other threads, on a stream of their own, while the encoder computes. Without
    TF32, as in a worker with float32 (`cluster.worker.setup`)."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    case = MEDIA_FAMILIES[name]()
    items = [one for request in case.requests for one in request.items]
    on_cpu = EncoderModel.from_model(case.model)
    expected = [on_cpu.encode(modality, [item])[0] for modality, item in items]
    moved = copy.deepcopy(case.model)
    nn.Module.to(moved, DEVICE)
    on_gpu = EncoderModel.from_model(moved)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            uploads = [threads.submit(on_gpu.upload, item) for _, item in items]
            for (modality, _), upload, rows in zip(items, uploads, expected, strict=True):
                got = on_gpu.encode(modality, [upload.result()])[0]
                torch.testing.assert_close(got.cpu(), rows, rtol=1e-3, atol=1e-3)
