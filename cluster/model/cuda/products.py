"""Products of activations with plain weights. Few tokens in 16 bits are multiplied by our kernels
(`product_kernels`), where these are faster than the library: such a product reads the weights and does little
else, and a library's tiles leave a part of the memory's bandwidth. Which way is faster is measured for each
size of matrix when a model is loaded (`product_choice`); without that, as an H100 measured it.

Enqueues on the current stream, reads nothing on the host, may be recorded. Needs triton, which the first
call of a kernel of ours imports.

Letters: T tokens, K columns of the weight, M outputs, S shares of the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two

_HALVES = (torch.bfloat16, torch.float16)
_MAX_SHARES = 8
_FEW_OUTPUTS = 2048  # of which a row alone has shorter shares


@dataclass(frozen=True)
class ProductCut:
    """How our kernels cut a product."""

    tokens: int  # at most
    outputs: int  # of a program
    step: int  # columns of the inner loop
    programs: int  # that the columns of several tokens are cut for
    stages: int = 3

    def __str__(self) -> str:
        return f"tiles of {self.outputs} outputs"

    def share_width(self, num_outputs: int, width: int) -> int:
        """Columns that a program sums, a multiple of the step."""
        if self.tokens == 1:
            return (4 if num_outputs > _FEW_OUTPUTS else 2) * self.step
        shares = min(power_of_two(-(-self.programs * self.outputs // num_outputs)), _MAX_SHARES)
        return -(-width // shares // self.step) * self.step


# Those that serve up to 16 tokens are of an H100's measurements for the matrices of 0.5B and 7B models. Those
# for more are reasoned: three programs fit on a multiprocessor, with enough bytes on their way. Wide tiles
# are cut into few shares, as partial sums of so many tokens take memory, too.
SMALLEST, SEVERAL = ProductCut(1, 2, 1024, 1), ProductCut(16, 64, 128, 200)
CANDIDATES: Mapping[int, Sequence[ProductCut]] = {
    1: [SMALLEST],
    16: [SEVERAL],
    64: [ProductCut(64, 64, 64, 200, stages=4), ProductCut(64, 128, 64, 100)],
}
_UNMEASURED = {1: SMALLEST, 16: SEVERAL}


def limit_of(num_tokens: int) -> int | None:
    """The key of `CANDIDATES` for so many tokens. None: the library multiplies them."""
    return next((limit for limit in CANDIDATES if 0 < num_tokens <= limit), None)


class ProductChoice:
    """What multiplies few tokens with a weight of some size, of one model on one device."""

    def __init__(self) -> None:
        self._measured: dict[tuple[int, ...], dict[int, ProductCut | None]] = {}

    def set(self, weight: Tensor, chosen: dict[int, ProductCut | None]) -> None:
        """chosen: by keys of `CANDIDATES`; None: the library."""
        self._measured[tuple(weight.shape)] = chosen

    def cut(self, x: Tensor, weight: Tensor) -> ProductCut | None:
        """None: the library."""
        limit = limit_of(len(x)) if x.dtype in _HALVES else None
        return None if limit is None else self._measured.get(tuple(weight.shape), _UNMEASURED).get(limit)


UNMEASURED = ProductChoice()


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, choice: ProductChoice = UNMEASURED, *,
    is_whole: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, K] times weight [M, K], plus bias [M], all contiguous. Returns shares [S, T, M]: partial sums in
    float32, or one in x's dtype (always, with `is_whole`)."""
    cut = choice.cut(x, weight)
    if cut is None:
        return F.linear(x, weight, bias)[None]
    return product_of_few(x, weight, bias, cut, is_whole=is_whole)


def product_of_few(
    x: Tensor, weight: Tensor, bias: Tensor | None, cut: ProductCut, *, is_whole: bool = False
) -> Tensor:  # fmt: skip
    """`product` by our kernels: at most `cut.tokens` tokens, in 16 bits."""
    from cluster.model.cuda import product_kernels as kernels

    (num_tokens, width), num_outputs = x.shape, len(weight)
    share_width = cut.share_width(num_outputs, width)
    if is_whole:
        share_width = -(-width // cut.step) * cut.step
    shares = -(-width // share_width)
    out = torch.empty(
        shares, num_tokens, num_outputs, dtype=torch.float32 if shares > 1 else x.dtype, device=x.device
    )
    sizes = (num_tokens, num_outputs, width, share_width)
    options = {
        "TILE": cut.outputs, "STEP": cut.step, "num_warps": 4, "num_stages": cut.stages,
        **early(x.device),
    }  # fmt: skip
    grid = (-(-num_outputs // cut.outputs), shares)
    if cut.tokens == 1:
        kernels.product_row[grid](x, weight, bias, out, *sizes[1:], **options)
    else:
        kernel = kernels.product_rows if cut.tokens <= SEVERAL.tokens else kernels.product_tile
        kernel[grid](x, weight, bias, out, *sizes, ROWS=cut.tokens, **options)
    return out
