"""Kernels compiled for GPUs that are not here. Importing it needs triton, which must not interpret."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

KINDS = {
    "query": "*bf16", "key": "*bf16", "value": "*bf16", "key_scales": "*fp16", "value_scales": "*fp16",
    "key_rows": "*bf16", "value_rows": "*bf16",
    "sinks": "*bf16", "out": "*bf16", "partial_out": "*fp32", "partial_stats": "*fp32",
    "residual": "*bf16", "shares": "*bf16", "post_weight": "*bf16", "pre_weight": "*bf16", "cos": "*bf16",
    "sin": "*bf16", "query_weight": "*bf16", "key_weight": "*bf16",
    "scaling": "fp32", "softcap": "fp32", "scale": "fp32", "post_epsilon": "fp32", "pre_epsilon": "fp32",
    "query_epsilon": "fp32", "key_epsilon": "fp32", "limit": "fp32", "alpha": "fp32", "offset": "fp32",
    "window": "i32", "table_stride": "i32", "share_stride": "i32", "num_seqs": "i32", "capacity": "i32",
    "x": "*bf16", "weight": "*bf16", "bias": "*bf16", "num_tokens": "i32", "num_outputs": "i32",
    "width": "i32", "share_width": "i32", "row_width": "i32", "key_stride": "i32", "key_head_stride": "i32",
    "value_stride": "i32", "value_head_stride": "i32",
}  # fmt: skip
BEFORE_ATTENTION = {"rope_write", "write_rows", "plan", "attend"}  # whose programs leave no room early
# kernels that read weights, or what the step's plan has, before the kernel before has ended
READ_BEFORE = {
    "product_row", "product_rows", "coded_rows", "shrink", "expand", "merge", "add_norm", "add_norm_row",
    "gated_norm",
}  # fmt: skip
MATRIX_SIZES = {"num_outputs", "width", "share_width"}  # multiples of 16 in products
NORM_WEIGHTS = {"post_weight", "pre_weight"}
# Bytes of a program. What is compiled for 8.0 runs on 8.6 and 8.9, too, which have the least.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def spilled_bytes(made) -> int:
    """Of a thread, which lie in memory because its registers are full."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", usage))


def check_compiles(
    module, name: str, constants: dict[str, Any], kinds: dict[str, str], capability: int,
    **options,
):  # fmt: skip
    kernel = getattr(module, name)
    kinds = dict.fromkeys(kernel.arg_names, "*i32") | KINDS | kinds  # those without a kind are int32 lists
    constants = {"EARLY": False} | constants if "EARLY" in kernel.arg_names else constants
    signature = {arg: "constexpr" if arg in constants else kinds[arg] for arg in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*") or (signature[arg] == "i32" and arg in MATRIX_SIZES)
    }
    is_early = capability >= 90 and "EARLY" in kernel.arg_names
    if is_early:
        constants, options = constants | {"EARLY": True}, options | {"launch_pdl": True}
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.metadata.shared <= SHARED[capability]
    assert f".target sm_{capability}" in made.asm["ptx"]
    waits = re.findall(r"griddepcontrol\.(\w+)", made.asm["ptx"])
    waits_first = name == "shrink" and "order" not in constants  # the order may be of the kernel before
    steps = ["wait", "launch_dependents"] if waits_first else ["launch_dependents", "wait"]
    if name in BEFORE_ATTENTION:
        steps = ["wait"]
    assert waits == (steps if is_early else [])
    before, wait, after = made.asm["ptx"].partition("griddepcontrol.wait")
    # weights, and what a step has from its beginning on, are read before
    reads_before = name in READ_BEFORE and not waits_first and not constants.keys() >= NORM_WEIGHTS
    assert not wait or (
        ("ld.global" in before) == reads_before and re.search(r"ld\.global|cp\.async\.cg", after)
    )
    return made
