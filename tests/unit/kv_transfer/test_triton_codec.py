"""The Triton codec makes the same bytes as torch in Triton's interpreter (TRITON_INTERPRET=1), and compiles
for GPUs that are not here."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from bench.codec import decode_groups, encode_groups  # noqa: E402
from cluster.kvcache.memory import BlockMemory, MemoryLayout  # noqa: E402
from cluster.model.kv_format import kv_segments  # noqa: E402
from kv_transfer.codecs import triton_codec as gpu  # noqa: E402
from kv_transfer.codecs.codec import Codec, places_of  # noqa: E402
from kv_transfer.codecs.quantisation import BITS, CodecName  # noqa: E402
from tests.fakes.far_memory import far_ids, far_memory  # noqa: E402

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETS, reason="wants TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(INTERPRETS, reason="interpreting: nothing is compiled")
each_codec = pytest.mark.parametrize("name", ["int8", "int4"])
NUM_GROUPS = 3
WIRE_BLOCKS = [2, 0]


class Case:
    """Two layers of differing shapes; numbers of every kind in them."""

    def __init__(self, name: CodecName, key: tuple[int, int], value: tuple[int, int], dtype, block_size: int):
        layout = MemoryLayout(kv_segments([key, value, value, key], block_size, dtype))
        self.codec = Codec(layout, name, None)
        per_group = self.codec.blocks_per_group
        self.kv = self.memory(layout, NUM_GROUPS * per_group)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.kv.num_blocks, generator=generator).view(NUM_GROUPS, per_group)
        self.groups = order[:2].numpy()
        for segment in self.kv.segments:
            segment.normal_(generator=generator)
            rows = segment.flatten(0, 1)
            rows[:, 0, 1] = 0
            rows[2::7] *= 1e-7
            rows[5] *= 1e4
            rows[3 + block_size, 0, 0] = torch.nan
            rows[4 + 2 * block_size, -1, 2] = -torch.inf

    @staticmethod
    def memory(layout: MemoryLayout, num_blocks: int) -> BlockMemory:
        return BlockMemory(layout, num_blocks)

    def wire(self) -> BlockMemory:
        return BlockMemory(self.codec.wire_layout, 3)

    def launch(self, kv: BlockMemory, wire: BlockMemory, layers: list[int], *, encodes: bool) -> None:
        """Each group as a job of its own."""
        table, codec = gpu.SegmentTable(kv, wire, self.codec.planes, BITS[self.codec.name]), self.codec
        jobs = [
            codec.job(kv, [group], wire, [block], layers)
            for group, block in zip(self.groups, WIRE_BLOCKS, strict=True)
        ]
        table.code(places_of(jobs, codec.blocks_per_group), encodes=encodes)


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.nan_to_num(12345), expected.nan_to_num(12345))


@needs_interpreter
@each_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("key", "value", "block_size"),
    [((2, 64), (2, 64), 16), ((3, 80), (1, 72), 32), ((1, 24), (5, 8), 64), ((2, 130), (2, 66), 1)],
)
def test_the_kernel_codes_as_torch_does(name, dtype, key, value, block_size: int) -> None:
    case = Case(name, key, value, dtype, block_size)
    wire, expected = case.wire(), case.wire()
    encode_groups(case.codec, case.kv, case.groups, expected, WIRE_BLOCKS)
    case.launch(case.kv, wire, [0, 1], encodes=True)
    assert all(map(same, wire.segments, expected.segments))
    if dtype == torch.bfloat16:
        return  # when it decodes, the interpreter truncates bfloat16; GPUs round it
    arrived, expected_kv = (BlockMemory(case.kv.layout, case.kv.num_blocks) for _ in range(2))
    decode_groups(case.codec, wire, WIRE_BLOCKS, expected_kv, case.groups)
    case.launch(arrived, wire, [0, 1], encodes=False)
    assert all(map(same, arrived.segments, expected_kv.segments))


@needs_interpreter
@each_codec
def test_blocks_may_lie_anywhere_in_a_large_memory(name: CodecName) -> None:
    case = Case(name, (2, 16), (2, 16), torch.float16, 16)
    far, wires = far_memory(case.kv.layout), (case.wire(), case.wire())
    ids = far_ids(far, case.kv.num_blocks)
    for target, source in zip(far.segments, case.kv.segments, strict=True):
        target[ids.start :] = source
    case.launch(case.kv, wires[0], [0, 1], encodes=True)
    near, case.groups = case.groups, case.groups + ids.start
    case.launch(far, wires[1], [0, 1], encodes=True)
    assert all(map(same, *(wire.segments for wire in wires)))
    case.launch(far, wires[1], [0, 1], encodes=False)
    case.groups = near
    case.launch(case.kv, wires[0], [0, 1], encodes=False)
    assert all(same(a[ids.start :], b) for a, b in zip(far.segments, case.kv.segments, strict=True))


@needs_interpreter
@each_codec
def test_only_the_layers_that_are_named_are_coded(name: CodecName) -> None:
    case = Case(name, (2, 16), (2, 16), torch.float32, 16)
    wire, expected = case.wire(), case.wire()
    encode_groups(case.codec, case.kv, case.groups, expected, WIRE_BLOCKS, [1])
    case.launch(case.kv, wire, [1], encodes=True)
    assert all(map(same, wire.segments, expected.segments))
    assert not wire.segments[0].any()


@needs_compiler
@each_codec
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("encodes", [True, False])
def test_the_codec_kernel_compiles(encodes: bool, kind: str, name: CodecName, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gpu.code_groups
    constants = {"NUM_TILES": 8, "BLOCK_SIZE": 16, "BITS": BITS[name], "ALIGNMENT": 16, "ENCODES": encodes}
    pointers = {"kv": f"*{kind}", "codes": "*i8", "scales": "*fp16", "segments": "*i64", "jobs": "*i32"}
    signature = {arg: "constexpr" if arg in constants else pointers[arg] for arg in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg in pointers
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in compiled.asm["ptx"]
