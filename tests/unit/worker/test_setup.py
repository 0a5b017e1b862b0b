from __future__ import annotations

import sys
from pathlib import Path

from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs
from cluster.worker.setup import SWITCH_INTERVAL_S, set_up

MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"


def test_the_threads_of_a_worker_change_places_sooner_than_pythons_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EPDG_SOCKET_DIR", str(tmp_path))
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        set_up(
            resolve(ClusterArgs(model=str(MODEL), device="cpu"), read_environment(), num_cores=1), "replica"
        )
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S < 0.005
    finally:
        sys.setswitchinterval(before)
