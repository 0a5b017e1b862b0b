"""How often Serve's controller looks at its deployments: ten times a second while one of them changes, once a
second otherwise. A look takes 2 ms of CPU time and also calls Ray's GCS; Serve knows one interval only.

`install` runs in the controller's process, before its loop. Serve calls it by name
(RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH in `local_environment`). A lost worker is seen at the next look.
"""

from __future__ import annotations

from typing import Any

BUSY_S, QUIET_S = 0.1, 1.0
NUM_BUSY = 20  # looks after the last change: proxies learn of new replicas in the looks that follow


class Pace:
    """The interval after each look."""

    def __init__(self) -> None:
        self._num_settled = 0  # looks since the last that saw a change

    def after(self, *, is_settled: bool) -> float:
        self._num_settled = self._num_settled + 1 if is_settled else 0
        return QUIET_S if self._num_settled > NUM_BUSY else BUSY_S


def install() -> None:
    from ray.serve._private import controller
    from ray.serve._private.common import DeploymentStatus
    from ray.serve._private.deployment_state import DeploymentStateManager

    pace, update = Pace(), DeploymentStateManager.update

    def update_and_pace(self: DeploymentStateManager, *args: Any, **options: Any) -> bool:
        any_recovering = update(self, *args, **options)
        statuses = [info.status for info in self.get_deployment_statuses()]
        is_settled = bool(statuses) and all(status is DeploymentStatus.HEALTHY for status in statuses)
        controller.CONTROL_LOOP_INTERVAL_S = pace.after(is_settled=is_settled and not any_recovering)
        return any_recovering

    DeploymentStateManager.update = update_and_pace
