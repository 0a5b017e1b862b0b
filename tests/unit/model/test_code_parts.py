"""Parts of quantised weights, as ranks hold them: codes of some rows and columns are those of the same part
of the plain weight, in every format and wherever the part begins, and little else of the file is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.weight_formats import Header, read_entry
from cluster.model.dequantising import DequantisedSlice, FusedSlice
from cluster.model.layers.codes import CodeKind, joined
from tests.flow.quantised_folders import MXFP4_ENTRY, in_mxfp4
from tests.flow.quantised_formats import FORMS

EXPERTS = "m.experts.down_proj"
NUM_ROWS, WIDTH = 96, 320
ROWS = (range(96), range(48, 96), range(8, 24), range(5, 7), range(95, 96))
# of columns: from a group's beginning on; with all columns of a few groups; from inside of a group on
COLUMNS = (range(320), range(160, 320), range(48, 64), range(80, 208), range(200, 320), range(7, 30))
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8",
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip


class Counted:
    """A tensor of a file, of which it is counted what is read."""

    def __init__(self, tensor: Tensor):
        self._tensor, self.num_bytes = tensor.contiguous(), 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        found = self._tensor[index]
        self.num_bytes += found.nbytes
        return found


def weight_of(entry: dict[str, Any], tensors: dict[str, Counted], dtypes: dict[str, str]) -> DequantisedSlice:
    """The weight that these tensors are; of experts, the second one's."""
    headers = {name: Header(dtypes[name], tuple(each.get_shape())) for name, each in tensors.items()}
    if entry is MXFP4_ENTRY:
        form = read_entry(entry["quant_method"], entry, "gpt_oss")
        fused = FusedSlice(form.stored(EXPERTS, headers)[1], form, tensors, torch.float32, is_turned=True)
        return fused.matrices(columns_first=True)[1]
    form = read_entry(entry["quant_method"], entry, "llama")
    return DequantisedSlice(form.stored("a", headers)[1], form, tensors, torch.float32)


def in_form(name: str) -> tuple[DequantisedSlice, Tensor, dict[str, Counted]]:
    """A weight of this format, what it stands for, and its tensors."""
    weight = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) / 50
    parts, expected = FORMS[name].matrix(weight)
    tensors = {f"a{ending}": Counted(each) for ending, each in parts.items()}
    dtypes = {f"a{ending}": DTYPES[each.dtype] for ending, each in parts.items()}
    return weight_of(FORMS[name].entry, tensors, dtypes), expected, tensors


@pytest.mark.parametrize("form", FORMS)
def test_codes_of_a_part_are_that_part_of_the_plain_weight(form: str) -> None:
    weight, expected, _ = in_form(form)
    for rows in ROWS:
        for columns in COLUMNS:
            codes = weight.codes("a", rows=rows, columns=columns)
            part = expected[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(codes.plain(torch.float32), part), (rows, columns)
            is_even = len(codes.scales[0]) == 1 or codes.group % 16 == 0
            assert weight.has_codes_of(columns) == (is_even and len(columns) % 4 == 0)


@pytest.mark.parametrize("form", FORMS)
def test_rows_from_several_places_become_one_matrix(form: str) -> None:
    weight, expected, _ = in_form(form)
    places = (range(8, 24), range(50, 53), range(72, 96))
    codes = joined([weight.codes("a", rows=rows, columns=range(160, 320)) for rows in places])
    rows = [row for own in places for row in own]
    assert torch.equal(codes.plain(torch.float32), expected[rows, 160:])


def test_codes_of_a_part_of_mxfp4_experts() -> None:
    experts = torch.randn(3, WIDTH, NUM_ROWS, generator=torch.Generator().manual_seed(0)) / 50
    parts = {f"{EXPERTS}{ending}": each for ending, each in in_mxfp4(experts).items()}
    tensors = {name: Counted(each) for name, each in parts.items()}
    weight = weight_of(MXFP4_ENTRY, tensors, dict.fromkeys(parts, "U8"))
    expected = weight[...]
    for rows in ROWS:
        for columns in COLUMNS:
            codes = weight.codes("a", rows, columns)
            part = expected[rows.start : rows.stop, columns.start : columns.stop]
            assert codes.kind is CodeKind.E2M1 and torch.equal(codes.plain(torch.float32), part)


def test_a_rank_reads_its_share_alone() -> None:
    """With so many bytes for a weight as codes, scales and zeros have."""
    for form in (
        "compressed fp8 in blocks",
        "compressed fp8 by rows",
        "W4A16 with zeros",
        "AWQ",
        "GPTQ with zeros",
    ):
        shares = []
        for rows in (range(48), range(48, 96)):
            for columns in (range(160), range(160, 320)):
                weight, _, tensors = in_form(form)
                weight.codes("a", rows=rows, columns=columns)
                shares.append(sum(each.num_bytes for each in tensors.values()))
        weight, _, tensors = in_form(form)
        weight.codes("a")
        whole = sum(each.num_bytes for each in tensors.values())
        # a scale of a row is read with both halves of it
        assert whole <= sum(shares) <= whole + 2 * NUM_ROWS, form
