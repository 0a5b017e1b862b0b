"""Products with weights that are codes, in Triton's interpreter, which has to be asked for:
TRITON_INTERPRET=1. The codes come out of files of every format; what they stand for is known apart
(`quantised_formats`)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cluster.config.weight_formats import Header, read_entry
from cluster.model.cuda.coded_choice import keep_right_codes
from cluster.model.cuda.coded_products import (
    CODED_ROWS,
    coded_product,
    plain_weight,
    same_scale,
    whole_product,
)
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.dequantising import DequantisedSlice
from cluster.model.layers.codes import CodedLinear, CodeKind, Codes, alike
from tests.fakes.slow_params import often
from tests.flow.quantised_formats import (
    FORMS,
    Form,
    awq,
    compressed_integers,
    fp8,
    gptq,
)

# The interpreter does not compute in bfloat16: it cuts off where a GPU rounds.
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
CODED: dict[str, Form] = {
    **{name: form for name, form in FORMS.items() if "not filled" not in name},
    "fp8 in blocks of 128": fp8(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, ".weight_scale_inv", (128, 128), (0, 0)
    ),
    "fp8 in blocks of 16": fp8(
        {"quant_method": "fp8", "weight_block_size": [16, 16]}, ".weight_scale_inv", (16, 16), (0, 0)
    ),
    "W4A16 in groups of 32": compressed_integers(4, 32),
    "W4A16 in groups of 48": compressed_integers(4, 48),
    "AWQ in groups of 128": awq(128),
    "GPTQ in groups of 64": gptq(4, 64, is_symmetric=False),
    "GPTQ of 8 bits in groups of 384": gptq(8, 384, is_symmetric=False),
}  # fmt: skip
# By kind of the codes, and by how groups and steps lie in each other.
DIFFERENT = (
    "compressed fp8 by rows", "fp8 in blocks of 128", "W4A16", "W4A16 by rows with zeros", "NVFP4",
    "AWQ in groups of 128", "GPTQ in groups of 64", "GPTQ of 8 bits in groups of 384",
)  # fmt: skip
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}  # fmt: skip
each_form = pytest.mark.parametrize("form", often(CODED, DIFFERENT))
SMALL, WIDE = (40, 384), (24, 2304)


@dataclass
class Case:
    codes: Codes
    plain: Tensor  # float32
    read: DequantisedSlice


def case(form: str, shape: tuple[int, int], seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    parts, plain = CODED[form].matrix(weight)
    entry = CODED[form].entry
    quantisation = read_entry(entry["quant_method"], entry, "")
    tensors = {f"linear{part}": tensor for part, tensor in parts.items()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    headers = {name: Header(names[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    _, stored = quantisation.stored("linear", headers)
    read = DequantisedSlice(stored, quantisation, tensors, torch.float32)
    assert read.has_codes_of(range(weight.shape[1]))
    return Case(read.codes("linear"), plain, read)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", CODED)
def test_codes_are_what_the_reader_dequantises(form: str) -> None:
    """Bit by bit, in one layout for all formats, which takes no more than the file's codes."""
    for shape in (SMALL, (48, 1152)):
        made = case(form, shape)
        codes = made.codes
        assert torch.equal(codes.plain(torch.float32), made.read[...])
        assert torch.equal(codes.plain(torch.float32), made.plain)
        assert torch.equal(codes.plain(torch.bfloat16), made.plain.bfloat16())
        bits = 4 if codes.kind in (CodeKind.NIBBLE, CodeKind.E2M1) else 8
        assert codes.numbers.nbytes == shape[0] * shape[1] * bits // 8
        tensors = (codes.numbers, codes.scales, codes.zeros)
        assert all(each is None or each.is_contiguous() for each in tensors)


def test_groups_that_are_no_multiples_of_16_have_no_codes() -> None:
    form = FORMS["fp8 in blocks that are not filled"]
    parts, _ = form.matrix(torch.randn(48, 96))
    quantisation = read_entry("fp8", form.entry, "")
    tensors = {f"a{part}": tensor for part, tensor in parts.items()}
    headers = {"a.weight": Header("F8_E4M3", (48, 96)), "a.weight_scale_inv": Header("F32", (2, 3))}
    _, stored = quantisation.stored("a", headers)
    assert not DequantisedSlice(stored, quantisation, tensors, torch.float32).has_codes_of(range(96))


@interpreted
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_plain_weight_is_that_of_the_reader(form: str, dtype: torch.dtype) -> None:
    made = case(form, SMALL)
    assert torch.equal(plain_weight(made.codes, dtype), made.plain.to(dtype))


def test_every_e4m3_code_is_its_number() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16)
    numbers[(numbers & 0x7F) == 0x7F] = 0
    codes = Codes(CodeKind.E4M3, numbers, torch.ones(1, 1), None, 16, 16, 16)
    assert torch.equal(codes.plain(torch.float32), numbers.view(torch.float8_e4m3fn).float())
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert torch.equal(plain_weight(codes, torch.float32), codes.plain(torch.float32))


@interpreted
@each_form
@pytest.mark.parametrize("shape", [SMALL, WIDE])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_a_product_is_that_of_the_plain_weight(form: str, shape: tuple[int, int], num_tokens: int) -> None:
    """Of short groups in 16 bits: of the plain weight in 16 bits."""
    made = case(form, shape)
    x, bias = torch.randn(num_tokens, shape[1]), torch.randn(shape[0])
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 5e-4)):
        own, own_bias = x.to(dtype), bias.to(dtype)
        is_rounded = same_scale(made.codes, 128) < 128
        plain = made.plain.to(dtype).float() if is_rounded else made.plain
        expected = F.linear(own.float(), plain, own_bias.float())
        shares = coded_product(own, made.codes, own_bias)
        by_library = dtype == torch.float32 and num_tokens == 17
        is_cut = not by_library
        assert (len(shares) > 1) == is_cut
        assert shares.dtype == (torch.float32 if is_cut else dtype)
        assert relative(shares.sum(0, dtype=torch.float32), expected) < (1e-6 if is_cut else tolerance)
        whole = coded_product(own, made.codes, None, is_whole=True)
        assert whole.shape == (1, num_tokens, shape[0]) and whole.dtype == dtype
        assert relative(whole[0], F.linear(own.float(), plain)) < tolerance


def exactly_cast(monkeypatch) -> None:
    """The interpreter errs in subnormal numbers of bfloat16: by their bits, as a GPU casts."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            bits = source.data.view(np.uint16).astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
            return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    monkeypatch.setattr(builder, "cast_impl", cast_impl)


@interpreted
@pytest.mark.parametrize("form", DIFFERENT)
@pytest.mark.parametrize("real", [False, True])
def test_numbers_are_exact_in_bfloat16(form: str, real: bool, monkeypatch) -> None:
    """Their products are not interpreted."""
    from tests.fakes import exact_kernel

    exactly_cast(monkeypatch)
    codes, width = case(form, SMALL).codes, 128
    kind, out = codes.kind, torch.empty(SMALL[0], width)
    if kind is CodeKind.E4M3:
        codes.numbers[0, :128] = torch.tensor([*range(0x70), *range(0x80, 0x90)])  # subnormal ones, too
    zeros = codes.zeros[:, 0].float() if codes.zeros is not None else torch.full((SMALL[0],), codes.middle)
    unit = 2.0**-6 if kind in (CodeKind.BYTE, CodeKind.NIBBLE) else 1.0
    kernel: Any = exact_kernel.numbers
    kernel[(5,)](codes.words, zeros * unit, out, SMALL[1], KIND=int(kind), TILE=8, STEP=width, REAL=real)
    scales = torch.ones(SMALL[0], 1)
    whole = replace(codes, scales=scales, zeros=zeros[:, None], group=SMALL[1], scale_rows=1)
    expected = whole.plain(torch.float32)[:, :width]
    assert torch.equal(out, expected * (1.0 if real else unit))


@interpreted
@pytest.mark.parametrize("form", ["compressed fp8 by rows", "AWQ in groups of 128"])
def test_a_row_is_the_same_in_any_company(form: str) -> None:
    """Bit by bit, from two rows to the most that our kernels take."""
    made = case(form, WIDE)
    x = torch.randn(CODED_ROWS, WIDE[1]).half()
    expected = whole_product(x[:2], made.codes, None)
    for num_tokens in (3, 16, 17, 64, 65, CODED_ROWS):
        assert torch.equal(whole_product(x[:num_tokens], made.codes, None)[:2], expected), num_tokens
    moved = whole_product(x[:20].flip(0), made.codes, None)
    assert torch.equal(moved[-2:].flip(0), expected)


@interpreted
def test_many_rows_are_multiplied_with_the_plain_weight() -> None:
    made = case("AWQ in groups of 128", SMALL)
    x = torch.randn(CODED_ROWS + 1, SMALL[1])
    found = coded_product(x.half(), made.codes, None)
    assert torch.equal(found[0], F.linear(x.half(), made.plain.half()))
    assert torch.equal(coded_product(x, made.codes, None)[0], F.linear(x, made.plain))
    assert coded_product(x[:0], made.codes, None).shape == (1, 0, SMALL[0])


@interpreted
@pytest.mark.parametrize(
    ("form", "scale_rows"),
    [("modelopt fp8", 1), ("fp8 in blocks of 128", 128), ("W4A16 with zeros", 1), ("W8A16", 1)],
)
def test_matrices_that_follow_each_other_are_one(form: str, scale_rows: int) -> None:
    rows = (256, 128, 144) if scale_rows > 1 else (48, 24, 24)
    cases = [case(form, (size, 384), seed) for seed, size in enumerate(rows)]
    parts = alike([each.codes for each in cases])
    assert parts is not None and {each.scale_rows for each in parts} == {scale_rows}
    every_zero = [each.zeros for each in parts if each.zeros is not None]
    zeros = torch.cat(every_zero) if every_zero else None
    numbers, scales = (torch.cat([getattr(each, name) for each in parts]) for name in ("numbers", "scales"))
    merged = Codes(parts[0].kind, numbers, scales, zeros, 384, parts[0].group, scale_rows)
    assert torch.equal(merged.plain(torch.float32), torch.cat([each.plain for each in cases]))
    assert torch.equal(plain_weight(merged, torch.float32), merged.plain(torch.float32))


def test_matrices_that_differ_do_not_become_one() -> None:
    of = {name: case(name, SMALL).codes for name in ("AWQ", "W4A16", "W8A16", "modelopt fp8")}
    assert alike([of["AWQ"], of["W4A16"]]) is None  # one has zeros
    assert alike([of["W8A16"], of["W4A16"]]) is None
    assert alike([of["modelopt fp8"], case("compressed fp8 in blocks", SMALL).codes]) is None


@interpreted
def test_a_linear_of_codes_is_a_linear() -> None:
    made = case("AWQ", SMALL)
    bias = torch.randn(SMALL[0])
    linear = CodedLinear(made.codes, bias, whole_product)
    x = torch.randn(2, 5, SMALL[1])
    assert relative(linear(x), F.linear(x, made.plain, bias)) < 1e-6
    assert [name for name, _ in linear.named_parameters()] == ["bias"]
    assert sum(each.nbytes for each in linear.buffers()) < made.plain.nbytes / 4


@interpreted
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_load_keeps_codes_whose_numbers_are_exact(form: str, dtype: torch.dtype) -> None:
    """Of one share of the columns, and of several, whose sums are joined."""
    for shape in (SMALL, WIDE):
        bias = torch.randn(shape[0]).to(dtype)
        model = nn.ModuleDict({
            "plain": CodedLinear(case(form, shape).codes, None, whole_product),
            "biased": CodedLinear(case(form, shape).codes, bias, whole_product),
        })  # fmt: skip
        keep_right_codes(model, dtype, experts_forward)
        assert all(isinstance(linear, CodedLinear) for linear in model.values())
