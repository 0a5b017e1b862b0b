"""Marks in a recorded step, on a GPU: each replay sets them anew, one after the other, and launches that begin
early wait on both sides of one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cluster.model.cuda.capture import capture_cuda
from cluster.model.cuda.layer_calls import Norm, add_norm
from cluster.model.cuda.layer_marks import LayerMarks
from tests.gpu.device import triton_device

DEVICE = triton_device()
CYCLES = 100_000_000  # of a layer: some 50 ms
DEADLINE_S = 10.0


@torch.inference_mode()
def test_a_mark_is_set_when_its_replay_has_come_there() -> None:
    marks, x = LayerMarks(DEVICE), torch.zeros(1, 4096, device=DEVICE)
    norm = Norm(torch.full((4096,), 2.0, device=DEVICE), 0.0)

    def step() -> torch.Tensor:
        rows = x
        for layer_idx in range(2):
            torch.cuda._sleep(CYCLES)
            rows = add_norm(rows, None, norm)
            marks.record(layer_idx)
            rows = add_norm(rows, None, norm)
        return rows

    replay = capture_cuda()(step)
    for number in range(1, 4):
        marks.finish()
        x.fill_(number)
        told: list[Callable[[], bool]] = []
        rows = replay()
        marks.report(lambda _, ready=None, /, told=told: told.append(ready))
        assert [ready() for ready in told] == [False, False]
        end = time.monotonic() + DEADLINE_S
        while not told[0]() and time.monotonic() < end:
            pass
        assert [ready() for ready in told] == [True, False]
        torch.cuda.synchronize()
        assert all(ready() for ready in told)
        assert torch.equal(rows, torch.full_like(rows, 2.0))
