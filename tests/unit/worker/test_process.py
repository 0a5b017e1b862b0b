"""A worker's process whose transfer thread has lost its device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.lost_device import DeviceLostError
from cluster.worker.process import WorkerProcess
from cluster.worker.setup import set_up

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"
LAYOUT = MemoryLayout((SegmentSpec(4, (2,), torch.float32),))


@pytest.mark.parametrize("which", ["only", "own", "features"])
@pytest.mark.parametrize("error", [DeviceLostError("gone"), RuntimeError("a bug")])
def test_a_worker_ends_whose_transfers_have_lost_the_device(error, which, tmp_path, monkeypatch) -> None:
    """It may have no step that would find out. Another error costs transfers alone."""
    monkeypatch.setenv("EPDG_SOCKET_DIR", str(tmp_path))
    interval = sys.getswitchinterval()
    args = resolve(ClusterArgs(model=str(MODEL), device="cpu"), read_environment(), num_cores=1)
    setup = set_up(args, f"w-{which}-{error}", transport="in_process")
    sys.setswitchinterval(interval)
    process = WorkerProcess(
        setup,
        "model",
        incoming=None if which == "only" else BlockMemory(LAYOUT, 2),
        features=BlockMemory(LAYOUT, 2),
    )
    engine: Any = None  # no step is taken
    process.seat.attach(engine)
    process.attach(lambda door, message: None)
    transfers = process.feature_transfer_engine if which == "features" else process.transfer_engine

    def lost():
        raise error

    monkeypatch.setattr(transfers.agent, "notifications", lost)
    transfers.step()
    if isinstance(error, DeviceLostError):
        with pytest.raises(RuntimeError):
            process.check_health()
    else:
        process.check_health()
