"""What adapters add to a product on a GPU: our two launches give what products with all slots give, recorded
as well, with the slots of the replay; and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from cluster.model.cuda.adapter_products import add_to_few
from cluster.model.layers.trial import agree
from cluster.model.slot_matrices import SlotMatrices, Update
from cluster.model.step_adapters import StepAdapters
from tests.gpu.device import triton_device

DEVICE = triton_device()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LINEARS = [("q", 0, 3584), ("k", 3584, 4096), ("v", 4096, 4608)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@torch.inference_mode()
def test_launches_equal_products_with_all_slots(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    step = StepAdapters(8, 64)
    updates = SlotMatrices(LINEARS, 3584, 4608, step, DEVICE, dtype)
    for slot, rank in ((1, 16), (2, 64), (8, 3)):
        pieces = {
            path: Update(torch.randn(rank, 3584) / 60, torch.randn(end - begin, rank) / rank**0.5)
            for path, begin, end in LINEARS
        }
        updates.write_slot(slot, pieces)
    x, zeros = (
        torch.randn(40, 3584, device=DEVICE).to(dtype),
        torch.zeros(40, 4608, device=DEVICE, dtype=dtype),
    )
    slots = torch.tensor([0, 1, 2, 8, 5] * 8, device=DEVICE)
    with step.of_step(slots):
        updates.add_to(expected := zeros.clone(), x)
        add_to_few(together := zeros.clone(), x, updates)
    assert agree(together, expected, TOLERANCES[dtype])
    assert not together[[0, 4]].any()
    for rows in (slice(1, 2), slice(7, 30)):
        with step.of_step(slots[rows]):
            add_to_few(alone := zeros[rows].clone(), x[rows], updates)
        assert torch.equal(alone, together[rows])
    graph, recorded, given = torch.cuda.CUDAGraph(), zeros.clone(), torch.zeros_like(slots)
    with torch.cuda.graph(graph), step.of_step(given):
        recorded.zero_()
        add_to_few(recorded, x, updates)
    given.copy_(slots)
    graph.replay()
    assert torch.equal(recorded, together)
