"""A GPU that breaks while a replica starts: the error says what an operator can do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.lost_device import DeviceLostError
from deploy.serving.replicas import Replica

BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered")


def failing_load(args: ClusterArgs, setup: Any) -> None:
    raise BROKEN


class FailingService:
    def __init__(self, args: ClusterArgs, setup: Any):
        """It is loaded, and fails when it warms up."""

    async def start(self) -> None:
        raise BROKEN


def refused(args: ClusterArgs, setup: Any) -> None:
    raise ConfigError("no such model")


class Undrained(Replica):
    def __del__(self) -> None:
        """Serve awaits the one of a replica; these tests do not."""


@pytest.fixture(autouse=True)
def _in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), app_name="app")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("deploy.serving.replicas.bind_to_node_address", lambda: None)


async def start(service: Any) -> None:
    replica = Undrained(ClusterArgs(device="cpu"), f"{__name__}:{service.__name__}", 1, ())
    await replica.record_replica_metadata()


@pytest.mark.parametrize("service", [failing_load, FailingService])
async def test_a_start_in_which_the_gpu_breaks_names_the_way_out(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.serving.replicas.has_triton", lambda: True)
    with pytest.raises(DeviceLostError, match=r"illegal memory access.*`gpu_kernels: none`"):
        await start(service)


async def test_without_our_kernels_there_is_no_such_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.serving.replicas.has_triton", lambda: False)
    with pytest.raises(RuntimeError, match=f"^{BROKEN}$"):
        await start(failing_load)


async def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"^no such model$"):
        await start(refused)
