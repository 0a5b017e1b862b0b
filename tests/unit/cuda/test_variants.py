"""Steps that differ in their sizes alone are served by kernels that are compiled already: no request waits
for the compiler because its step has a number of tokens that none had before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cluster.model.cuda.adapter_products import add_to_few
from cluster.model.cuda.coded_products import coded_product
from cluster.model.cuda.draw import RECORD, draw_tokens
from cluster.model.cuda.packed_attention import PackedAttention
from cluster.model.cuda.products import product
from cluster.model.cuda.tower_calls import QkvHeads, rotate
from cluster.model.layers.codes import CodeKind, Codes
from cluster.model.slot_matrices import SlotMatrices
from cluster.model.step_adapters import StepAdapters
from tests.fakes.strict_triton import Launch

WIDTH, OUTPUTS = 256, 48


def rows(num_tokens: int, width: int = WIDTH) -> torch.Tensor:
    return torch.ones(num_tokens, width, dtype=torch.bfloat16, device="cuda")


def by_weights(num_tokens: int) -> None:
    product(rows(num_tokens), rows(OUTPUTS), None)


def by_codes(num_tokens: int) -> None:
    words = torch.zeros(OUTPUTS, 2, 16, dtype=torch.int32, device="cuda")
    scales = torch.ones(OUTPUTS, 4, dtype=torch.float16, device="cuda")
    coded_product(rows(num_tokens), Codes(CodeKind.NIBBLE, words, scales, None, WIDTH, 64, 1), None)


def by_adapters(num_tokens: int) -> None:
    device = torch.device("cuda", 0)
    step = StepAdapters(num_slots=2, rank=8)
    updates = SlotMatrices([("q", 0, OUTPUTS)], WIDTH, OUTPUTS, step, device, torch.bfloat16)
    with step.of_step(torch.ones(num_tokens, dtype=torch.int64, device="cuda")):
        add_to_few(rows(num_tokens, OUTPUTS), rows(num_tokens), updates)


def by_segments(num_tokens: int) -> None:
    """Heads one after the other: their distance follows from the number of tokens."""
    query, key, value = (rows(4 * num_tokens, 80).view(4, num_tokens, 80).transpose(0, 1) for _ in range(3))
    starts = torch.tensor([0, num_tokens], device="cuda")
    PackedAttention().attend(query, key, value, starts, 0.1)


def by_rotation(num_tokens: int) -> None:
    table = torch.ones(num_tokens, 80, device="cuda")
    rotate(rows(num_tokens, 3 * 4 * 80), QkvHeads(4, 4, 80), (table, table))


def by_draws(num_tokens: int) -> None:
    records = np.zeros(num_tokens, RECORD)
    records["top_k"][0] = 20
    draw_tokens(torch.ones(num_tokens, 5000, device="cuda"), records)


@pytest.mark.parametrize(
    ("launch", "sizes"),
    [
        (by_weights, (2, 7, 16)), (by_codes, (2, 7, 16)), (by_codes, (17, 32, 200)),
        (by_adapters, (2, 7, 16)), (by_adapters, (17, 32, 50)), (by_segments, (70, 200, 512)),
        (by_rotation, (70, 200, 512)),
        (by_draws, (2, 7, 16)),
    ],
)  # fmt: skip
def test_another_number_of_tokens_is_no_other_kernel(
    launch: Callable[[int], None], sizes: tuple[int, ...], launches: list[Launch]
) -> None:
    found: list[list[object]] = []
    for num_tokens in sizes:
        launches.clear()
        launch(num_tokens)
        found.append([each.variant for each in launches])
    assert found[0] and all(variants == found[0] for variants in found)
