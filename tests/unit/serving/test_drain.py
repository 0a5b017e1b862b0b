"""What a replica asks of its service when Serve reconfigures it, and when it shuts it down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config.settings import ClusterArgs, DoorArgs
from cluster.errors import ConfigError
from cluster.worker.process import STOP_TIMEOUT_S
from deploy.app import DOOR_STOP_S, DRAIN_TIMEOUT_S, Hosts, compose
from deploy.serving.replicas import DRAIN_S, DecodeReplica, Replica
from tests.fakes.model_folders import DEMO_MODEL


class Service:
    def __init__(self):
        self.asked: list[tuple] = []

    async def drain(self, timeout_s: float) -> None:
        self.asked.append(("drain", timeout_s))

    async def stop(self) -> None:
        self.asked.append(("stop",))


async def test_a_replica_of_every_pool_drains_before_it_stops():
    for kind in (Replica, DecodeReplica):
        service = Service()
        replica: Any = SimpleNamespace(_service=service)  # Serve's context is not here
        await kind.__del__(replica)
        assert service.asked == [("drain", DRAIN_S), ("stop",)]
    not_made: Any = SimpleNamespace()  # its service could not be made
    await Replica.__del__(not_made)


def test_a_drained_replica_has_time_left_to_stop():
    assert DRAIN_S + STOP_TIMEOUT_S < DRAIN_TIMEOUT_S


def test_a_door_may_go_on_for_longer_than_a_request_lasts():
    args = ClusterArgs(model=str(DEMO_MODEL), door=DoorArgs(request_timeout_s=40.0))
    door: Any = compose(args, Hosts(frozenset(), frozenset()))._bound_deployment
    assert door._deployment_config.graceful_shutdown_timeout_s == 40.0 + DOOR_STOP_S
    for pool in door.init_args[3].values():
        assert pool._bound_deployment._deployment_config.graceful_shutdown_timeout_s == DRAIN_TIMEOUT_S


def test_a_replica_gets_the_phases_of_its_rank():
    config = {"phases_by_rank": [["prefill"], ["decode"]]}
    for user_config, rank, phases in (
        (config, 0, ["prefill"]),
        (config, 1, ["decode"]),
        (config, 7, ["decode"]),
        ({}, 0, None),
        (None, 3, None),
    ):
        assigned: list[object] = []
        service = SimpleNamespace(assign=assigned.append)
        Replica.reconfigure(
            cast(Replica, SimpleNamespace(_service=service)), user_config, SimpleNamespace(rank=rank)
        )
        assert assigned == [phases]
    with pytest.raises(ConfigError, match="unknown fields of user_config: phases"):
        Replica.reconfigure(cast(Replica, SimpleNamespace()), {"phases": ["prefill"]}, None)
