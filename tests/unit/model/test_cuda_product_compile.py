"""Our products compile for GPUs that are not here: of few tokens, with codes, of experts, of adapters. Wants
triton, and compiles only where it does not interpret."""

from __future__ import annotations

import os
import re
from itertools import chain
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreting: nothing is compiled", allow_module_level=True)

from cluster.model.cuda import (  # noqa: E402
    adapter_kernels,
    coded_kernels,
    expert_kernels,
    expert_products,
    product_kernels,
)
from cluster.model.cuda.products import CANDIDATES, ProductCut  # noqa: E402
from tests.unit.model.compiling import check_compiles, spilled_bytes  # noqa: E402

EXPERT_SIZES = dict.fromkeys(
    ("expert_stride", "output_stride", "width_stride", "scale_rows", "run", "num_groups"), "i32"
)


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
