"""Launches of products with matrices of codes, with experts and with adapters, for `bench.gpu.compiled`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu.issue import Work
from cluster.model.cuda import adapter_products, coded_products, expert_products, products
from cluster.model.layers.codes import RUN, WORDS, CodedExperts, CodeKind, Codes

# outputs and inputs of 7B's four matrices
MATRICES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate, up": (37888, 3584), "down": (3584, 18944)}
ROWS = (1, 16, 64)
# kind, columns and rows of a scale (None: all columns), zeros, dtype of the scales
FORMATS: dict[str, tuple[CodeKind, int | None, int, bool, torch.dtype]] = {
    "E4M3 in blocks": (CodeKind.E4M3, 128, 128, False, torch.bfloat16),
    "E4M3 by rows": (CodeKind.E4M3, None, 1, False, torch.bfloat16),
    "INT8": (CodeKind.BYTE, 128, 1, False, torch.bfloat16),
    "4 bits": (CodeKind.NIBBLE, 128, 1, False, torch.bfloat16),
    "4 bits, zeros": (CodeKind.NIBBLE, 128, 1, True, torch.bfloat16),
    "MXFP4": (CodeKind.E2M1, 32, 1, False, torch.uint8),
    "NVFP4": (CodeKind.E2M1, 16, 1, False, torch.float32),
}
EXPERT_FORMATS = ("E4M3 in blocks", "4 bits, zeros", "MXFP4")
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768  # Qwen3-30B-A3B
SLOTS, RANK = 8, 16  # of adapters


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(form: str, num_rows: int, width: int) -> Codes:
    kind, group, scale_rows, has_zeros, dtype = FORMATS[form]
    is_half = kind in (CodeKind.NIBBLE, CodeKind.E2M1)
    shape = (num_rows, -(-width // RUN), WORDS) if is_half else (num_rows, width)
    grid = -(-num_rows // scale_rows), -(-width // (group or width))
    return Codes(
        kind, empty(*shape, dtype=torch.int32 if is_half else torch.uint8), empty(*grid, dtype=dtype),
        empty(*grid, dtype=torch.uint8) if has_zeros else None, width, group or width, scale_rows,
    )  # fmt: skip


def calls() -> Iterator[str]:
    """Calls launchers; says what each call was."""
    for rows, candidates in products.CANDIDATES.items():
        for name, (num_outputs, width) in MATRICES.items():
            for cut in candidates:
                products.product_of_few(empty(rows, width), empty(num_outputs, width), None, cut)
                yield f"7B {name}, {cut}, {rows}"
    for rows in ROWS:
        for name, (num_outputs, width) in MATRICES.items():
            for form in FORMATS:
                coded_products.coded_product(empty(rows, width), codes(form, num_outputs, width), None)
                yield f"7B {name}, {form}, {rows}"
    for rows in ROWS:
        for form in ("bf16", *EXPERT_FORMATS):
            _experts(form, rows)
            yield f"30B-A3B, {form}, {rows}"
    for rows in ROWS:
        for name, (num_outputs, width) in MATRICES.items():
            _adapters(rows, width, num_outputs)
            yield f"7B {name}, adapters, {rows}"


def _experts(form: str, num_tokens: int) -> None:
    def matrices(num_outputs: int, width: int) -> Any:
        if form == "bf16":
            return empty(EXPERTS, num_outputs, width)
        return CodedExperts(codes(form, EXPERTS * num_outputs, width), EXPERTS)

    experts: Any = SimpleNamespace(
        has_gate=True, has_bias=False, gate_up_proj=matrices(2 * INNER, HIDDEN), is_transposed=False,
        down_proj=matrices(HIDDEN, INNER), _is_expert_parallel=False,
        _apply_gate=lambda rows: rows[:, :INNER],
    )  # fmt: skip
    chosen = empty(num_tokens, CHOSEN, dtype=torch.int64)
    expert_products.experts_forward(experts, empty(num_tokens, HIDDEN), chosen, empty(num_tokens, CHOSEN))


def _adapters(num_tokens: int, width: int, num_outputs: int) -> None:
    slots = empty(num_tokens, dtype=torch.int64)
    step = SimpleNamespace(slots=slots, num_slots=SLOTS, rank=RANK, in_order=lambda: (slots, slots))
    updates: Any = SimpleNamespace(
        step=step, num_linears=1, down=empty(SLOTS * RANK, width), up=empty(SLOTS * RANK, num_outputs),
        ranks=empty(1 + SLOTS, dtype=torch.int32), ends=empty(2, dtype=torch.int32),
    )  # fmt: skip
    adapter_products.add_to_few(empty(num_tokens, num_outputs), empty(num_tokens, width), updates)


def work(name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> Work | None:
    """None: its programs do not read one matrix in equal parts."""
    given = arguments
    if name in ("product_row", "product_rows", "product_tile"):
        ahead = name != "product_tile"  # of the loop
        return Work(_nbytes(given), prod(grid), given["share_width"] // given["STEP"] - ahead)
    if name == "coded_rows":
        return Work(_nbytes(given), prod(grid), given["share_steps"] - 1)
    if name == "multiply_rows":
        num_tokens = len(given["order"]) / CHOSEN
        num_experts = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** num_tokens)  # as many are chosen on average
        reads = int(_nbytes(given) * num_experts / EXPERTS)
        return Work(reads, round(num_experts * grid[1]), -(-given["width"] // given["STEP"]))
    if name in ("shrink", "expand"):  # each program reads a tile, of device memory or of the cache
        tile = given["STEP"] if name == "shrink" else given["TILE"]
        return Work(
            prod(grid) * given["RANKS"] * tile * given["x" if name == "shrink" else "y"].itemsize,
            prod(grid),
            1,
        )
    return None


def _nbytes(arguments: dict[str, Any]) -> int:
    names = ("weight", "numbers", "scales", "zeros")
    return sum(each.nbytes for name in names if (each := arguments.get(name)) is not None)
