"""The GPU path on a GPU: our kernels and flash-attn against a plain softmax, recorded decode steps against
unrecorded ones. Not run yet anywhere: no machine of this project had a GPU."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
import transformers as hf
from torch import nn

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import AttentionShape, LayerAttention
from cluster.model.attention_flash import FlashAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda import decode_attention
from cluster.model.cuda.choice import choose
from cluster.model.cuda.libraries import installed
from cluster.model.encoder import EncoderModel
from cluster.model.kv_format import QuantizedRows, kv_segments
from cluster.model.language import LanguageModel
from kv_transfer.codecs.checksum import BlockSums, checksum_blocks
from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.quantisation import CODECS
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.gpu.cases import Heads, check_recorded_steps, paged_case

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HEADS = [Heads(28, 4, 128, 128), Heads(14, 2, 64, 64), Heads(8, 8, 80, 80), Heads(8, 1, 256, 256)]
LAYERS = [LayerAttention(0.1), LayerAttention(0.1, sliding_window=100), LayerAttention(0.1, softcap=20.0)]
DEVICE = "cuda"


@pytest.mark.parametrize(("name", "library"), [(None, None), *installed()], ids=lambda each: str(each)[:12])
@pytest.mark.parametrize("sizes", [[(0, 300), (0, 70)], [(500, 200), (0, 33)], [(1, 1), (777, 1), (2000, 1)]])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_every_library_equals_dense_attention(
    name, library, sizes, layer, heads, block_size, kv_cache_dtype
) -> None:
    case = paged_case(
        sizes, layer, heads, block_size=block_size, kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16,
        device=DEVICE,
    )  # fmt: skip
    backend = FlashAttention(TorchAttention(), library, library, decode_attention.is_available(), 100)
    out = backend.attend(case.batch, layer, case.query, case.new_key, case.new_value, case.cache)
    torch.testing.assert_close(out.float(), case.expected, rtol=2e-2, atol=2e-2)


@needs_triton
@pytest.mark.parametrize("heads", [*HEADS, Heads(16, 1, 192, 128)])
@pytest.mark.parametrize("num_splits", [1, 7, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_decode_kernel_equals_dense_attention(heads, num_splits, kv_cache_dtype) -> None:
    layer = LayerAttention(0.1, 1000, 20.0, torch.linspace(-1, 1, heads.query, device=DEVICE))
    case = paged_case(
        [(0, 1), (700, 1), (5000, 1)], layer, heads, block_size=16, kv_cache_dtype=kv_cache_dtype,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    batch = case.batch
    out = decode_attention.paged_decode(
        case.query, case.cache, batch.block_tables, batch.context_lens_tensor, layer, num_splits
    )
    torch.testing.assert_close(out.float(), case.expected, rtol=2e-2, atol=2e-2)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_write_kernel_makes_the_same_codes_and_scales_as_the_cache_itself(dtype) -> None:
    heads = Heads(4, 4, 128, 128)
    case = paged_case(
        [(10, 90)], LayerAttention(1.0), heads, kv_cache_dtype="int8", dtype=dtype, device=DEVICE
    )
    store = case.cache.key
    assert isinstance(store, QuantizedRows)
    codes, scales = store.codes.clone(), store.scales.clone()
    store.codes.flatten(0, 1)[case.batch.slots] = 9
    store.scales.flatten(0, 1)[case.batch.slots] = 9
    decode_attention.write_quantised(store, case.batch.slots, case.new_key)
    assert torch.equal(store.codes, codes)
    assert torch.equal(store.scales, scales)


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
def test_a_model_on_the_gpu_gets_the_cuda_backend() -> None:
    layout = MemoryLayout(kv_segments([(4, 128)] * 2, 16, torch.bfloat16))
    shape = AttentionShape(layout, 16, 28, LayerAttention(128**-0.5))
    backend = choose(torch.device(DEVICE, 0), torch.bfloat16, shape, TorchAttention())
    assert isinstance(backend, FlashAttention)


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
        codec.encode_groups(kv, groups, wire, wire_ids)
        codec.decode_groups(wire, wire_ids, back, groups)
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
