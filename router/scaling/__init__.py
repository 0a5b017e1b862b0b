"""How many workers each pool should have, and which phases workers of several phases should do. Pure: no Ray,
no clock, no I/O. The controller of Ray Serve and the simulator run the same objects.

    DoorReport (of every door), PoolState (of every pool) → Snapshot → Scaler.decide → ScalingDecision

`report` makes the report of a door, `snapshot` has the values, `demand` turns the doors' totals into workers
that each phase needs, `phases` divides workers of several phases, `scaler` decides. `deploy.serving.scaling`
feeds it under Ray Serve, `bench.router.scaled_pools` in virtual time."""

from router.scaling.scaler import Scaler, ScalingDecision, ScalingSettings
from router.scaling.snapshot import DoorReport, PoolState, Snapshot

__all__ = ["DoorReport", "PoolState", "Scaler", "ScalingDecision", "ScalingSettings", "Snapshot"]
