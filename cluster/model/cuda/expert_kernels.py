"""The Triton kernel of products with experts. Importing it needs triton; `expert_products` launches it.

Rows that chose one expert lie in one segment. A program multiplies a tile of a segment's rows by a tile of
outputs of the expert's matrix. It goes along the inner dimension in equal steps, so a row's bits depend on
the row alone, in any company. Sums are float32; float32 products are exact ones (`ieee`).

A matrix of codes becomes numbers tile by tile (`coded_kernels`): (code - zero) * scale in float32, rounded to
the dtype of the rows, as a checkpoint's are that is dequantised while it is read. So products differ from
those in the order of their sums at most. The numbers are the first operand of the matrix unit, which may lie
in registers, and sums of outputs and rows are turned at the end.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from cluster.model.cuda.coded_kernels import code_words, group_scales, scaled_numbers
from cluster.model.cuda.packed_kernels import TILE_WIDTH

PLAIN = tl.constexpr(-1)  # no `CodeKind`


@triton.jit
def multiply_rows(
    x, weight, scales, zeros, bias, order, tiles, out,
    expert_stride, output_stride, width_stride, num_outputs, width, scale_rows, run, num_groups,
    CHOSEN: tl.constexpr, GATHERS: tl.constexpr, KIND: tl.constexpr, MIDDLE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GROUPS: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, cdiv(num_outputs, OUTPUTS)). tiles: as `packed_kernels.cut_segments` makes them of the
    experts' segments. order [S]: the pair of token and choice in each row of the segments, of which a token
    has CHOSEN side by side.

    GATHERS: x [T, width] has a row for each token, out [S, num_outputs] one for each row of the segments.
    Else x [S, width] has rows of the segments, and out a row for each pair. bias [experts, num_outputs].

    KIND PLAIN: weight has numbers, and a matrix is `expert_stride` of them long; scales and zeros are None.
    Else weight has the words of codes, as one matrix of all experts' rows (`layers.codes.Codes`), and strides
    are not read; scales as in `coded_kernels.group_scales`."""
    # size: one loop over plain weights or codes, between the same rows and the same sums
    record = tiles + tl.program_id(0) * TILE_WIDTH
    first, end = tl.load(record), tl.load(record + 2)
    if first < end:
        expert = tl.load(record + 3)
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        pairs = tl.load(order + rows, mask=is_row, other=0).to(tl.int64)
        if GATHERS:
            sources, targets = pairs // CHOSEN, rows.to(tl.int64)
        else:
            sources, targets = rows.to(tl.int64), pairs
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = outputs < num_outputs
        total = tl.zeros([ROWS, OUTPUTS] if KIND == PLAIN else [OUTPUTS, ROWS], tl.float32)
        if KIND != PLAIN:
            matrix_rows = expert * num_outputs + outputs
            exact: tl.constexpr = x.dtype.element_ty if REAL else tl.float16
            if GROUPS > 1:  # read a step ahead
                scale, zero = group_scales(
                    scales, zeros, matrix_rows, is_output, 0, scale_rows, run, num_groups, KIND, MIDDLE,
                    GROUPS, exact, REAL,
                )  # fmt: skip
        for step in range(tl.cdiv(width, STEP)):
            columns = step * STEP + tl.arange(0, STEP)
            is_column = columns < width
            contents = tl.load(
                x + sources[:, None] * width + columns[None, :],
                mask=is_row[:, None] & is_column[None, :], other=0.0,
            )  # fmt: skip
            if KIND == PLAIN:
                factors = tl.load(
                    weight + expert.to(tl.int64) * expert_stride
                    + columns[:, None] * width_stride + outputs[None, :] * output_stride,
                    mask=is_column[:, None] & is_output[None, :], other=0.0,
                )  # fmt: skip
                total = tl.dot(contents, factors, total, input_precision="ieee")
            else:
                words = code_words(weight, matrix_rows, is_output, step, width, KIND, STEP)
                if GROUPS > 1:
                    own_scale, own_zero = scale, zero
                    scale, zero = group_scales(
                        scales, zeros, matrix_rows, is_output, step + 1, scale_rows, run, num_groups, KIND,
                        MIDDLE, GROUPS, exact, REAL,
                    )  # fmt: skip
                else:
                    own_scale, own_zero = group_scales(
                        scales, zeros, matrix_rows, is_output, step, scale_rows, run, num_groups, KIND,
                        MIDDLE, GROUPS, exact, REAL,
                    )  # fmt: skip
                factors = scaled_numbers(
                    words, own_scale, own_zero, KIND, OUTPUTS, STEP, GROUPS, exact, REAL, x.dtype.element_ty
                )
                # added apart, as in `coded_kernels`
                total = tl.fma(tl.dot(factors, tl.trans(contents), input_precision="ieee"), 1.0, total)
        if KIND != PLAIN:
            total = tl.trans(total)
        dtype: tl.constexpr = out.dtype.element_ty
        products = total.to(dtype)
        if bias is not None:
            added = tl.load(
                bias + expert.to(tl.int64) * num_outputs + outputs, mask=is_output, other=0.0
            )  # fmt: skip
            products = (products.to(tl.float32) + added.to(tl.float32)[None, :]).to(dtype)
        mask = is_row[:, None] & is_output[None, :]
        tl.store(out + targets[:, None] * num_outputs + outputs[None, :], products, mask=mask)
