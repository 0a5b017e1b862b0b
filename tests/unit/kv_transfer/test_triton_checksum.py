"""The checksum kernel finds torch's sums in Triton's interpreter (TRITON_INTERPRET=1), and compiles for GPUs
that are not here."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from cluster.kvcache.memory import MemoryLayout, SegmentSpec  # noqa: E402
from cluster.model.kv_format import kv_segments  # noqa: E402
from kv_transfer.codecs import checksum  # noqa: E402
from kv_transfer.codecs import triton_checksum as gpu  # noqa: E402
from kv_transfer.codecs.checksum import BlockSums, tensor_checksum  # noqa: E402
from kv_transfer.codecs.codec import Codec  # noqa: E402
from tests.fakes.slow_memory import SlowMemory  # noqa: E402

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETS, reason="wants TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETS, reason="interpreting: nothing is compiled")
KV = MemoryLayout(kv_segments([(2, 20), (3, 8)], 16, torch.bfloat16))
LAYOUTS = {
    "KV": KV,
    "blocks of one token": MemoryLayout(kv_segments([(4, 128)] * 2, 1, torch.float32)),
    "more than a tile": MemoryLayout(kv_segments([(1, 80), (4, 80)], 64, torch.float16)),
    "int8 wire": Codec(KV, "int8", None).wire_layout,
    "odd sizes": MemoryLayout((SegmentSpec(3, (5,), torch.uint8), SegmentSpec(2, (9,), torch.uint8))),
    "less than a word": MemoryLayout((SegmentSpec(1, (3,), torch.uint8),)),
}
LISTS = [[3, 1], [4], [0, 1, 2, 3, 4]]


@needs_interpreter
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_kernel_finds_torchs_sums(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SlowMemory(LAYOUTS[kind], 5, num_looks=lambda: 0)
    memory.buffer.random_(0, 256, generator=torch.Generator().manual_seed(1))
    sums = BlockSums(memory)
    sums.use_triton()
    launches = []
    add_sums = gpu.add_sums
    monkeypatch.setattr(gpu, "add_sums", lambda *tables: (launches.append(tables), add_sums(*tables)))
    found = [sums.of(ids) for ids in LISTS]
    sums.begin()
    assert len(launches) == 1
    for ids, pending in zip(LISTS, found, strict=True):
        assert pending.is_done()
        expected = tensor_checksum(segment[ids].flatten(1).view(torch.uint8) for segment in memory.segments)
        assert pending.value() == checksum.Checksum("tensor", expected)


@needs_compiler
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("in_words", [True, False])
def test_the_checksum_kernel_compiles(in_words: bool, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gpu.sum_blocks
    constants = {"IN_WORDS": in_words, "TILE": gpu.TILE_WORDS}
    pointers = {
        "memory": "*i64" if in_words else "*u8", "segments": "*i64", "totals": "*i64", "blocks": "*i64",
    }  # fmt: skip
    signature = {arg: "constexpr" if arg in constants else pointers[arg] for arg in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg in pointers
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", capability, 32)
    )
    assert f".target sm_{capability}" in compiled.asm["ptx"] and ".add.u64" in compiled.asm["ptx"]
