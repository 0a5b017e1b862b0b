"""The kernels of a layer beside its products, of attention, towers and draws compile for GPUs that are not
here, in the sizes that their callers choose. Wants triton, and compiles only where it does not interpret."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreting: nothing is compiled", allow_module_level=True)

from cluster.kvcache.memory import BlockMemory, MemoryLayout  # noqa: E402
from cluster.model.cuda import (  # noqa: E402
    attention_kernels,
    draw_kernels,
    filter_kernels,
    layer_kernels,
    packed_attention,
    packed_kernels,
    tower_kernels,
)
from cluster.model.cuda.paged_attention import tiles_for  # noqa: E402
from cluster.model.kv_format import KvCacheDtype, kv_segments, layer_cache  # noqa: E402
from tests.unit.model.compiling import check_compiles, spilled_bytes  # noqa: E402

ROPE = {
    "QUERY_HEADS": 28, "KV_HEADS": 4, "K_WIDTH": 80, "K_PAD": 128, "V_WIDTH": 80, "V_PAD": 128, "SHARES": 1,
    "HEADS": 4, "ROTARY": 64, "ROTATION": 0, "TABLE": 0, "NORM_BEFORE": True, "NORM_AFTER": False, "FORM": 0,
    "QUERY_STEP": 80,
}  # fmt: skip
WRITE = {name: ROPE[name] for name in ("KV_HEADS", "K_WIDTH", "K_PAD", "V_WIDTH", "V_PAD", "HEADS")}


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
