"""Marks in a recorded step, on a GPU: every replay sets them again, one after the other. Kernels that begin
early wait for the kernel before, also where a mark lies between the two."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cluster.model.cuda.capture import capture_cuda
from cluster.model.cuda.layer_calls import Norm, add_norm
from cluster.model.cuda.layer_marks import LayerMarks
from tests.gpu.device import triton_device

DEVICE = triton_device()
SIZE, TIMES = 8192, 4  # of the products of a layer, in float32: some 50 ms at least
DEADLINE_S = 10.0


class Told:
    def __init__(self) -> None:
        self._ready: list[Callable[[], bool]] = []

    def __call__(self, layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
        assert ready is not None and layer_idx == len(self._ready)
        self._ready.append(ready)

    def are_ready(self) -> list[bool]:
        return [ready() for ready in self._ready]


@torch.inference_mode()
def test_a_mark_is_set_when_its_replay_has_come_there() -> None:
    marks, x = LayerMarks(DEVICE, 2), torch.zeros(1, 4096, device=DEVICE)
    square, made = (torch.zeros(SIZE, SIZE, device=DEVICE) for _ in range(2))
    norm = Norm(torch.full((4096,), 2.0, device=DEVICE), 0.0)

    def step() -> torch.Tensor:
        rows = x
        for layer_idx in range(2):
            for _ in range(TIMES):
                torch.mm(square, square, out=made)
            rows = add_norm(rows, None, norm)
            marks.record(layer_idx)
            rows = add_norm(rows, None, norm)
        return rows

    replay = capture_cuda()(step)
    for number in range(1, 4):
        marks.begin()
        x.fill_(number)
        rows, told = replay(), Told()
        marks.report(told)
        assert told.are_ready() == [False, False]
        end = time.monotonic() + DEADLINE_S
        while not told.are_ready()[0] and time.monotonic() < end:
            pass
        assert told.are_ready() == [True, False]
        torch.cuda.synchronize()
        assert told.are_ready() == [True, True]
        assert torch.equal(rows, torch.full_like(rows, 2.0))
