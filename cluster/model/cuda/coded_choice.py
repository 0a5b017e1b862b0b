"""Which linears of a model compute from their codes on this GPU: those whose products are the products of
the plain weight. The others become plain, and the log names them. Runs once, on the loading thread; takes
seconds, most of it for compiling."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import nn

from cluster.model.cuda.coded_products import CODED_ROWS
from cluster.model.layers.codes import CodedLinear

logger = logging.getLogger(__name__)

_ROWS = (1, 2, 17, CODED_ROWS + 1)  # each by another kernel
# Relative, by the 2-norm. Sums of 16 bit numbers are rounded once, and of many rows the weights, too.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}


@torch.inference_mode()
def keep_right_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """All tensors of `model` are on the device. One linear of each form and size is compared."""
    faults: dict[object, str | None] = {}
    num_kept = 0
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if not isinstance(child, CodedLinear):
                continue
            form = (child.codes.form, child.bias is None)
            if form not in faults:
                faults[form] = _fault(child, dtype)
                if faults[form] is not None:
                    logger.warning(
                        "codes: %s of %d × %d: dequantised, because %s",
                        child.codes.kind.name, child.out_features, child.in_features, faults[form],
                    )  # fmt: skip
            if faults[form] is None:
                num_kept += 1
            else:
                setattr(parent, name, _plain(child, dtype))
    if faults:
        torch.cuda.empty_cache()  # what torch keeps would count as used when the KV cache is planned
        logger.info("codes: %d linears compute from their codes", num_kept)


def _fault(linear: CodedLinear, dtype: torch.dtype) -> str | None:
    """Why it must not be used; None: it is right."""
    device = linear.numbers.device
    weight = linear.codes.plain(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for num_rows in _ROWS:
        x = torch.randn(num_rows, linear.in_features, generator=generator).to(device, dtype)
        bias = None if linear.bias is None else linear.bias.float()
        expected = F.linear(x.float(), weight, bias)
        try:
            found = linear(x).float()
            error = float((found - expected).norm() / expected.norm())
        except Exception as error:  # compilers raise what they like; a device that broke raises it again
            return f"its kernel for {num_rows} rows fails: {error}"
        if not error <= _TOLERANCES[dtype]:  # also for NaN
            return f"its product of {num_rows} rows is wrong by {error:.1%}"
    return None


def _plain(linear: CodedLinear, dtype: torch.dtype) -> nn.Linear:
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    plain.weight = nn.Parameter(linear.codes.plain(dtype), requires_grad=False)
    plain.bias = linear.bias
    return plain
