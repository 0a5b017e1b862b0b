"""The Triton codec makes the same bytes as torch in Triton's interpreter (TRITON_INTERPRET=1), and compiles
for GPUs that are not here."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from cluster.kvcache.memory import BlockMemory, MemoryLayout  # noqa: E402
from cluster.model.kv_format import kv_segments  # noqa: E402
from kv_transfer.codecs import triton_codec as gpu  # noqa: E402
from kv_transfer.codecs.codec import Codec  # noqa: E402

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETS, reason="wants TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETS, reason="interpreting: nothing is compiled")
GROUPS = torch.tensor([[6, 1, 4, 3], [0, 5, 2, 7]])
WIRE_BLOCKS = torch.tensor([2, 0])


def memories(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Codec, BlockMemory, BlockMemory]:
    torch.manual_seed(0)
    layout = MemoryLayout(kv_segments([shape, shape], 16, dtype))
    codec = Codec(layout, "int8", None)
    kv = BlockMemory(layout, 8)
    for segment in kv.segments:
        segment.normal_()
        segment[:, :, 0, 1] = 0
        segment[:, 2] *= 1e-7
        segment[5, 1] *= 1e4
        segment[3, 3, 0, 0] = torch.nan
        segment[2, 4, 0, 2] = -torch.inf
    return codec, kv, BlockMemory(codec.wire_layout, 3)


def launch(kv: BlockMemory, wire: BlockMemory, *, encodes: bool) -> None:
    for segment in (0, 1):
        codes, scales = wire.segments[2 * segment : 2 * segment + 2]
        gpu.code_groups(kv.segments[segment], GROUPS, codes, scales, WIRE_BLOCKS, segment == 0, encodes)


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.nan_to_num(12345), expected.nan_to_num(12345))


@needs_interpreter
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # the interpreter truncates bfloat16, GPUs round it
@pytest.mark.parametrize("shape", [(2, 64), (3, 80), (1, 24)])
def test_the_kernels_code_as_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    codec, kv, wire = memories(shape, dtype)
    expected = BlockMemory(codec.wire_layout, 3)
    codec.encode_groups(kv, GROUPS.numpy(), expected, WIRE_BLOCKS.numpy())
    launch(kv, wire, encodes=True)
    assert all(map(same, wire.segments, expected.segments))
    arrived, expected_kv = BlockMemory(kv.layout, 8), BlockMemory(kv.layout, 8)
    codec.decode_groups(wire, WIRE_BLOCKS.numpy(), expected_kv, GROUPS.numpy())
    launch(arrived, wire, encodes=False)
    assert all(map(same, arrived.segments, expected_kv.segments))


@needs_compiler
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("is_key", [True, False])
def test_a_codec_kernel_compiles(is_key: bool, encodes: bool, kind: str, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gpu.code_keys if is_key else gpu.code_values
    sizes = {"CHANNELS": 512, "TILE": 64} if is_key else {"HEADS": 4, "WIDTH": 128, "RUNS": 2, "TILE": 16}
    constants = {**sizes, "BLOCK_SIZE": 16, "ENCODES": encodes}
    pointers = {
        "rows": f"*{kind}",
        "blocks": "*i64",
        "codes": "*i8",
        "scales": "*fp16",
        "wire_blocks": "*i64",
    }
    signature = {arg: "constexpr" if arg in constants else pointers[arg] for arg in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg in pointers
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in compiled.asm["ptx"]
