"""The kernels of a layer and of paged attention compile for GPUs that are not here, in the sizes that their
callers choose. Wants triton, and compiles only where it does not interpret."""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
from itertools import chain
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreting: nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cluster.kvcache.memory import BlockMemory, MemoryLayout  # noqa: E402
from cluster.model.cuda import (  # noqa: E402
    adapter_kernels,
    attention_kernels,
    coded_kernels,
    draw_kernels,
    expert_kernels,
    expert_products,
    filter_kernels,
    layer_kernels,
    packed_attention,
    packed_kernels,
    product_kernels,
    tower_kernels,
)
from cluster.model.cuda.paged_attention import tiles_for  # noqa: E402
from cluster.model.cuda.products import CANDIDATES, ProductCut  # noqa: E402
from cluster.model.kv_format import KvCacheDtype, kv_segments, layer_cache  # noqa: E402

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
ROPE = {
    "QUERY_HEADS": 28, "KV_HEADS": 4, "K_WIDTH": 80, "K_PAD": 128, "V_WIDTH": 80, "V_PAD": 128, "SHARES": 1,
    "HEADS": 4, "ROTARY": 64, "ROTATION": 0, "TABLE": 0, "NORM_BEFORE": True, "NORM_AFTER": False, "FORM": 0,
    "QUERY_STEP": 80,
}  # fmt: skip


BEFORE_ATTENTION = {"rope_write", "write_rows", "plan", "attend"}  # whose programs leave no room early
# kernels that read weights, or what the step's plan has, before the kernel before has ended
READ_BEFORE = {
    "product_row", "product_rows", "coded_rows", "shrink", "expand", "merge", "add_norm", "add_norm_row",
    "gated_norm",
}  # fmt: skip
MATRIX_SIZES = {"num_outputs", "width", "share_width"}  # multiples of 16 in products
NORM_WEIGHTS = {"post_weight", "pre_weight"}
EXPERT_SIZES = dict.fromkeys(
    ("expert_stride", "output_stride", "width_stride", "scale_rows", "run", "num_groups"), "i32"
)
# Bytes of a program. What is compiled for 8.0 runs on 8.6 and 8.9, too, which have the least.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
WRITE = {name: ROPE[name] for name in ("KV_HEADS", "K_WIDTH", "K_PAD", "V_WIDTH", "V_PAD", "HEADS")}


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
        if signature[arg].startswith("*")
        or (module in (product_kernels, coded_kernels) and arg in MATRIX_SIZES)
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


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "constants", "kinds"),
    [
        (
            "add_norm",
            {
                "WIDTH": 3584, "PAD": 4096, "SHARES": 2, "HAS_POST": True, "POST_FORM": 2, "HAS_PRE": True,
                "PRE_FORM": 0, "HAS_SCALE": True,
            },
            {"shares": "*fp32"},
        ),
        (
            "add_norm",
            {
                "WIDTH": 896, "PAD": 1024, "SHARES": 0, "HAS_POST": False, "POST_FORM": 0, "HAS_PRE": True,
                "PRE_FORM": 0, "HAS_SCALE": False, "shares": None, "post_weight": None, "pre_weight": None,
            },
            {},
        ),
        ("rope_write", {**ROPE, "key_scales": None, "value_scales": None}, {}),
        (
            "rope_write", {**ROPE, "K_WIDTH": 192, "K_PAD": 256, "ROTATION": 1, "TABLE": 2},
            {"key": "*i8", "value": "*i8"},
        ),
        ("gate_heads", {"HEADS": 16, "WIDTH": 256, "TILE": 1024, "SHARES": 2}, {"shares": "*fp32"}),
        ("write_rows", {**WRITE, "key_scales": None, "value_scales": None}, {}),
        ("write_rows", {**WRITE, "K_WIDTH": 192, "K_PAD": 256}, {"key": "*i8", "value": "*i8"}),
        ("gate", {"WIDTH": 4864, "TILE": 1024, "SHARES": 1, "KIND": 1, "HAS_LIMIT": True}, {}),
        ("total", {"WIDTH": 5120, "TILE": 1024, "SHARES": 4}, {"shares": "*fp32"}),
    ],
    ids=[
        "add_norm", "norm", "rope_write", "rope_write int8", "gate_heads", "write_rows",
        "write_rows int8", "gate", "total",
    ],
)  # fmt: skip
def test_a_kernel_of_a_layer_compiles(name: str, constants, kinds, capability: int) -> None:
    made = check_compiles(layer_kernels, name, constants, kinds, capability, enable_fp_fusion=False)
    assert spilled_bytes(made) == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("cut", list(chain(*CANDIDATES.values())), ids=str)
def test_products_of_few_tokens_compile(cut: ProductCut, has_bias: bool, capability: int) -> None:
    name = "product_row" if cut.tokens == 1 else "product_rows" if cut.tokens <= 16 else "product_tile"
    constants = {"TILE": cut.outputs, "STEP": cut.step, "ROWS": cut.tokens, "bias": None}
    if cut.tokens == 1:
        del constants["ROWS"]
    if has_bias:
        del constants["bias"]
    kinds = {"out": "*fp32" if has_bias else "*bf16"}
    made = check_compiles(product_kernels, name, constants, kinds, capability, num_stages=cut.stages)
    assert spilled_bytes(made) == 0
    if name == "product_tile" and capability == 90:  # matrix units read both operands from shared memory
        assert "wgmma" in made.asm["ptx"] and "prefetch.global.L2" in made.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("kind", "group", "zeros", "ones"),
    [
        (0, 128, None, ()), (0, 128, None, ("scale_rows", "num_groups")), (1, 128, "*u8", ("scale_rows",)),
        (2, 128, "*u8", ("scale_rows",)), (2, 32, None, ("scale_rows",)), (3, 16, None, ("scale_rows",)),
    ],
    ids=["E4M3 in blocks", "E4M3 by rows", "bytes", "nibbles", "nibbles in small groups", "NVFP4"],
)  # fmt: skip
def test_the_products_with_codes_compile(
    kind: int, group: int, zeros: str | None, ones: tuple[str, ...], capability: int
) -> None:
    """ones: sizes of 1, of which the compiler makes constants."""
    kinds = {
        "numbers": "*i32", "scales": "*fp32" if kind == 3 else "*bf16",
        "zeros": zeros or "", "out": "*fp32",
        **dict.fromkeys(("share_steps", "scale_rows", "run", "num_groups"), "i32"),
    }  # fmt: skip
    constants: dict[str, Any] = {"KIND": kind, "MIDDLE": 8, **dict.fromkeys(ones, 1)}
    constants |= {} if zeros else {"zeros": None}
    sizes = {"TILE": 16, "STEP": 256, "GROUPS": 256 // group, "REAL": False}
    check_compiles(
        coded_kernels, "plain_weight", {**constants, **sizes}, {**kinds, "out": "*bf16"}, capability
    )
    sizes = {"STEP": 128, "GROUPS": 128 // group, "REAL": group == 32}
    for rows, options in ((8, {"maxnreg": 96}), (16, {"maxnreg": 96}), *([(64, {})] if group == 128 else [])):
        made = check_compiles(
            coded_kernels, "coded_rows", {**constants, **sizes, "ROWS": rows, "TILE": 64}, kinds, capability,
            num_warps=4, num_stages=3, **options,
        )  # fmt: skip
        if capability == 90:
            is_float = kind == 3 and not sizes["REAL"]  # scales of float32 are no numbers of 16 bits
            made_of = [
                text.endswith("x2") for text in re.findall(r"(?:fma\.rn|mul)\.bf16(?:x2)?", made.asm["ptx"])
            ]
            # in the loop and after it: 2 * 64 numbers a thread, by pairs nearly all
            assert is_float or (len(made_of) + sum(made_of) >= 128 and sum(made_of) >= 48)
    sizes |= {"REAL": False, "ROWS": 16, "TILE": 32}
    floats = {**kinds, "x": "*fp32", "bias": "*fp32"}
    check_compiles(
        coded_kernels, "coded_rows", {**constants, **sizes}, floats, capability, num_warps=4, num_stages=3
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_that_draw_compile(capability: int) -> None:
    kinds = {
        "logits": "*fp32", "records": "*i64", "scores": "*fp32", "masses": "*fp32", "parts": "*fp32",
        "tokens": "*i64", "listed": "*i64", "boundaries": "*i64", "row_stride": "i32", "vocab_size": "i32",
        "num_tiles": "i32",
    }  # fmt: skip
    cut = {"TILE": 4096, "TILES_PAD": 64}
    parts = {"TILE": 4096, "PARTS": 64}
    for has_filters in (False, True):
        constants = {**parts, "FILTERS": has_filters}
        check_compiles(draw_kernels, "tile_scores", constants, kinds, capability, num_warps=8)
    check_compiles(draw_kernels, "draw_rows", cut, kinds, capability, num_warps=8)
    constants = {**cut, **parts, "PARTS_PAD": 4096}
    check_compiles(filter_kernels, "list_candidates", constants, kinds, capability, num_warps=8)
    constants = {**cut, "SLOTS": 64, "DRAW_SLOTS": 16}
    check_compiles(filter_kernels, "draw_filtered", constants, kinds, capability, num_warps=16)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 72, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_segments_compiles(width: int, dtype, capability: int) -> None:
    tiles = packed_attention.tiles_for(width, dtype == torch.float32)
    constants = {
        "GROUP": 1, "WIDTH": width, "RUN": tiles.run, "REST": tiles.rest, "ROWS": tiles.rows,
        "KEYS": tiles.keys, "ALIGNMENT": math.gcd(16, width),
    }  # fmt: skip
    kind = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    kinds: dict[str, str] = dict.fromkeys(("query", "key", "value", "out"), kind)
    kinds |= {f"{name}_{of}": "i32" for name in ("query", "key", "value") for of in ("stride", "head_stride")}
    check_compiles(
        packed_kernels, "attend_segments", constants, kinds, capability, num_warps=tiles.warps, num_stages=2
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_table_of_segments_compiles(capability: int) -> None:
    constants = {"ROWS": 64, "TILES": 128, "SEGMENTS": 32}
    kinds = {"starts": "*i32", "num_segments": "i32", "capacity": "i32"}
    check_compiles(packed_kernels, "cut_segments", constants, kinds, capability, num_warps=8)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "constants", "kinds"),
    [
        ("add_norm_row", {"WIDTH": 1280, "PAD": 2048, "FORM": 0, "shift": None}, {}),
        ("add_norm_row", {"WIDTH": 1152, "PAD": 2048, "FORM": 1, "added": None, "total": None}, {}),
        ("rotate_heads", {"query_weight": None, "key_weight": None}, {"cos": "*fp32", "sin": "*fp32"}),
        ("rotate_heads", {}, {}),
        ("rotate_heads", {"cos": None, "sin": None}, {}),
        ("activate", {"TILE": 1024, "KIND": 2}, {}),
    ],
    ids=["add and norm", "layer norm", "rotate", "norm and rotate", "norms of heads", "activate"],
)
def test_a_kernel_of_a_tower_compiles(name: str, constants, kinds, capability: int) -> None:
    given = {"added": "*bf16", "total": "*bf16", "shift": "*bf16", "qkv": "*bf16", "epsilon": "fp32"}
    given |= {**dict.fromkeys(("size", "num_table_rows"), "i32"), **kinds}
    if name == "rotate_heads":
        sizes = {
            "QUERY_HEADS": 16,
            "KV_HEADS": 16,
            "WIDTH": 80,
            "HALF_PAD": 64,
            "HEADS": 16,
            "FORM": 0,
            "ALIGNMENT": 16,
        }
        constants = {**sizes, **constants}
    check_compiles(tower_kernels, name, constants, given, capability, num_warps=4, enable_fp_fusion=False)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_experts_compile(dtype, has_bias: bool, gathers: bool, capability: int) -> None:
    tiles = expert_products.tiles_for(dtype)
    constants: dict[str, Any] = {
        "CHOSEN": 8, "GATHERS": gathers, "ROWS": tiles.rows, "OUTPUTS": tiles.outputs, "STEP": tiles.step,
        "KIND": -1, "MIDDLE": 0, "GROUPS": 1, "REAL": False, "scales": None, "zeros": None,
    }  # fmt: skip
    if not has_bias:
        constants["bias"] = None
    kind = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    kinds: dict[str, str] = dict.fromkeys(("x", "weight", "bias", "out"), kind) | {"order": "*i64"}
    kinds |= EXPERT_SIZES
    check_compiles(expert_kernels, "multiply_rows", constants, kinds, capability, num_warps=4, num_stages=2)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("kind", "group", "zeros", "scales"),
    [(0, 128, None, "*bf16"), (2, 128, "*u8", "*bf16"), (3, 32, None, "*u8"), (3, 16, None, "*fp32")],
)
@pytest.mark.parametrize(
    ("dtype", "has_many"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
def test_products_of_coded_experts_compile(
    dtype, has_many: bool, kind: int, group: int, zeros: str | None, scales: str, capability: int
) -> None:
    """In 16 bits on Hopper by its own matrix instruction, in both forms of tiles."""
    tiles = expert_products.tiles_for(dtype, is_coded=True, has_many=has_many)
    constants: dict[str, Any] = {
        "CHOSEN": 8, "GATHERS": True, "ROWS": tiles.rows, "OUTPUTS": tiles.outputs, "STEP": tiles.step,
        "KIND": kind, "MIDDLE": 8, "GROUPS": max(1, tiles.step // group), "bias": None,
        "REAL": dtype == torch.bfloat16 and scales != "*fp32",
    }  # fmt: skip
    constants |= {} if zeros else {"zeros": None}
    number = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    kinds: dict[str, str] = {
        "x": number, "out": number, "order": "*i64", "zeros": zeros or "",
        "weight": "*i32", "scales": scales, **EXPERT_SIZES,
    }  # fmt: skip
    made = check_compiles(
        expert_kernels, "multiply_rows", constants, kinds, capability, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if dtype == torch.bfloat16 and capability == 90:
        assert "wgmma.mma_async" in made.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_plan_and_the_merge_compile(capability: int) -> None:
    constants = {"ROW_TOKENS": 2, "TILE_TOKENS": 18, "ITEMS": 128, "SEQS": 32}
    check_compiles(attention_kernels, "plan", constants, {}, capability, num_warps=8)
    for merged in (1, 4):
        constants = {"HEADS": 28, "MERGED": merged, "V_WIDTH": 80, "V_PAD": 128, "SHARES_PAD": 32}
        check_compiles(attention_kernels, "merge", constants, {}, capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "kv_cache_dtype"),
    [
        (28, 4, 128, torch.bfloat16, "auto"),
        (28, 4, 128, torch.bfloat16, "int8"),
        (14, 2, 64, torch.bfloat16, "auto"),
        (8, 1, 256, torch.bfloat16, "auto"),
        (8, 1, 256, torch.bfloat16, "int8"),
        (28, 4, 128, torch.float32, "int8"),
    ],
)
def test_attention_compiles(
    heads: int, kv_heads: int, width: int, dtype, kv_cache_dtype: KvCacheDtype, is_prompt, capability: int
) -> None:  # fmt: skip
    segments = kv_segments([(kv_heads, width)] * 2, 16, dtype, kv_cache_dtype)
    cache = layer_cache(BlockMemory(MemoryLayout(segments), 1), 0)
    tiles = tiles_for(heads, cache, dtype)
    run, runs = tiles.key_run
    constants: dict[str, Any] = {
        "BLOCK_SIZE": 16, "KV_HEADS": kv_heads, "GROUP": tiles.group, "K_WIDTH": width, "K_RUN": run,
        "K_RUNS": runs, "V_WIDTH": width, "V_RUN": run, "V_RUNS": runs, "HAS_SOFTCAP": True, "FACTOR": 1.0,
        "ROWS": tiles.prompt_tile if is_prompt else tiles.row_tile,
        "TILE": tiles.prompt_keys if is_prompt else tiles.row_keys, "HAS_PTX": dtype == torch.bfloat16,
    }  # fmt: skip
    kind = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    kinds: dict[str, str] = dict.fromkeys(("query", "out", "key", "value", "sinks"), kind)
    if kv_cache_dtype == "int8":
        kinds |= {"key": "*i16", "value": "*i16", "key_scales": "*i32", "value_scales": "*i32"}
    else:
        constants |= {"key_scales": None, "value_scales": None}
    options = {"num_warps": tiles.prompt_warps, "num_stages": 2}
    if not is_prompt:
        options = {
            "num_warps": tiles.row_warps, "num_stages": tiles.row_stages, "maxnreg": tiles.row_registers
        }  # fmt: skip
    made = check_compiles(attention_kernels, "attend", constants, kinds, capability, **options)
    tile = 2 * constants["TILE"] * width * (1 if kv_cache_dtype == "int8" else dtype.itemsize)
    assert made.metadata.shared >= (options["num_stages"] - 1) * tile  # so many keys and values come ahead
    assert capability != 90 or spilled_bytes(made) <= (128 if is_prompt and dtype == torch.float32 else 32)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_the_products_of_adapters_compile(dtype: str, capability: int) -> None:
    kinds: dict[str, str] = dict.fromkeys(("x", "down", "up", "y"), dtype)
    kinds |= {
        "slots": "*i64",
        "low": "*fp32",
        **dict.fromkeys(("num_rows", "num_slots", "num_shares"), "i32"),
    }
    for rows in (1, 4):
        constants: dict[str, Any] = {"RANK": 64, "RANKS": 16, "LINEARS": 3, "SLOTS": 16, "ROWS": rows}
        constants |= {"order": None} if rows == 1 else {}
        shrink = {"num_warps": 4, "num_stages": 1}
        check_compiles(adapter_kernels, "shrink", constants | {"STEP": 512}, kinds, capability, **shrink)
        constants |= {"ENDS": 4, "SHARES": 64, "TILE": 128}
        check_compiles(
            adapter_kernels, "expand", constants, kinds, capability, num_warps=1, num_stages=1
        )  # fmt: skip
