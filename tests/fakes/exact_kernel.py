"""A Triton kernel around a function of `coded_kernels`. Importing it needs triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.coded_kernels import code_words, exact_numbers


@triton.jit
def numbers(
    words, zeros, out, width,
    KIND: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Grid (rows / TILE,). What the first STEP codes of each row stand for in bfloat16, to out [rows, STEP]
    float32."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    read = code_words(words, rows, rows >= 0, 0, width, KIND, STEP)
    zero = tl.load(zeros + rows).to(tl.bfloat16)
    values = exact_numbers(read, zero[:, None], KIND, TILE, STEP, tl.bfloat16, REAL)
    tl.store(out + rows[:, None] * STEP + tl.arange(0, STEP)[None, :], values.to(tl.float32))
