"""Our Triton kernels compile for GPUs that are not here. Wants triton, and compiles only where it does not
interpret."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreting: nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cluster.model.cuda import kernels  # noqa: E402

POINTERS = {
    "query": "*bf16", "key": "*i8", "key_scales": "*fp16", "value": "*i8", "value_scales": "*fp16",
    "tables": "*i32", "context_lens": "*i64", "partial_out": "*fp32", "partial_stats": "*fp32",
    "sinks": "*bf16",
    "out": "*bf16",
    "rows": "*bf16", "slots": "*i64", "codes": "*i8", "scales": "*fp16",
}  # fmt: skip
NUMBERS = {
    "scaling": "fp32", "softcap": "fp32", "num_splits": "i32", "table_stride": "i32", "row_stride": "i32",
    "head_stride": "i32", "num_tokens": "i32",
}  # fmt: skip
SIZES = {"KV_HEADS": 4, "WIDTH": 128, "PAD": 128, "V_WIDTH": 128, "V_PAD": 128}
DECODE = SIZES | {
    "BLOCK_SIZE": 16, "GROUP": 7, "GROUP_PAD": 16, "K_WIDTH": 128, "K_PAD": 128, "TILE": 64, "WINDOW": 4096,
    "HAS_SOFTCAP": True,
}  # fmt: skip
WIDEST = {"K_WIDTH": 256, "K_PAD": 256, "V_WIDTH": 256, "V_PAD": 256}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("decode_split", {**DECODE, "QUANTISED": True}),
        ("decode_split", {**DECODE, "QUANTISED": False, "key_scales": None, "value_scales": None}),
        ("decode_split", {**DECODE, **WIDEST, "QUANTISED": False, "key_scales": None, "value_scales": None}),
        ("decode_reduce", {**SIZES, "HEADS": 28, "SPLITS_PAD": 64, "HAS_SINKS": True}),
        ("write_quantised", {**SIZES, "RUNS": 2, "RUNS_PAD": 2}),
        ("gather_quantised", {**SIZES, "TILE": 16}),
    ],
)
def test_a_kernel_compiles(name: str, constants: dict[str, Any], capability: int) -> None:
    kernel = getattr(kernels, name)
    kinds = POINTERS | NUMBERS
    if constants.get("QUANTISED") is False:
        kinds = {**kinds, "key": "*bf16", "value": "*bf16"}
    constants = {arg: value for arg, value in constants.items() if arg in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else kinds[arg] for arg in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, arg in enumerate(kernel.arg_names) if signature[arg].startswith("*")}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.metadata.shared < 100_000  # bytes that every GPU since Ampere can give a program
    assert f".target sm_{capability}" in compiled.asm["ptx"]
