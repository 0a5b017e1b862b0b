"""bench/gpu.py runs from end to end on the CPU, on a tiny model."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import SHAPES, TableLine, num_weights, smoke_rows


def test_the_smoke_run_measures_every_kind_of_row() -> None:
    with torch.inference_mode():
        rows = smoke_rows()
    assert [row.what for row in rows] == [
        "tiny decode, batch 1, context 32",
        "tiny decode, batch 2, context 32",
        "tiny prefill, 32 tokens",
        "tiny attention",
    ]
    assert all(row.bound_s > 0 and row.seconds > 0 for row in rows)


@pytest.mark.parametrize(("name", "millions"), [("0.5b", 494), ("7b", 7071)])
def test_weights_are_counted_as_published(name: str, millions: int) -> None:
    """Qwen2.5: 0.49 B with a tied table; 7.61 B, of which the untied input table is no part of a step."""
    assert num_weights(SHAPES[name]) / 1e6 == pytest.approx(millions, rel=0.005)


def test_a_row_tells_what_part_of_the_bound_was_reached() -> None:
    assert str(TableLine("step", 2e-6, 1e-6)).split() == ["step", "2.0", "1.0", "0.50"]
