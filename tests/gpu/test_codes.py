"""Products with weights that are codes, against those of the plain weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cluster.model.cuda.coded_products import CODED_ROWS, coded_product, plain_weight, whole_product
from cluster.model.layers.codes import Codes
from tests.unit.model.test_cuda_coded_products import DIFFERENT, case

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
SHAPE = (1040, 4608)


def on_device(codes: Codes) -> Codes:
    zeros = None if codes.zeros is None else codes.zeros.to(DEVICE)
    return replace(codes, numbers=codes.numbers.to(DEVICE), scales=codes.scales.to(DEVICE), zeros=zeros)


@pytest.mark.parametrize("form", DIFFERENT)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_are_those_of_the_plain_weight(form: str, dtype: torch.dtype) -> None:
    made = case(form, SHAPE)
    codes, plain = on_device(made.codes), made.plain.to(DEVICE)
    assert torch.equal(plain_weight(codes, dtype), plain.to(dtype))
    bias = torch.randn(SHAPE[0], device=DEVICE, dtype=dtype)
    for num_rows in (1, 2, 16, 17, 65, CODED_ROWS, CODED_ROWS + 1):
        x = torch.randn(num_rows, SHAPE[1], device=DEVICE, dtype=dtype)
        expected = F.linear(x.double(), plain.double(), bias.double())
        for found in (whole_product(x, codes, bias), coded_product(x, codes, bias, is_whole=True)[0]):
            error = float((found.double() - expected).norm() / expected.norm())
            assert error < TOLERANCES[dtype], (num_rows, error)


@pytest.mark.parametrize("form", DIFFERENT)
def test_a_row_is_the_same_in_any_company(form: str) -> None:
    codes = on_device(case(form, SHAPE).codes)
    x = torch.randn(CODED_ROWS, SHAPE[1], device=DEVICE, dtype=torch.bfloat16)
    expected = whole_product(x[:2], codes, None)
    for num_rows in (3, 16, 17, 64, 65, CODED_ROWS):
        assert torch.equal(whole_product(x[:num_rows], codes, None)[:2], expected), num_rows
