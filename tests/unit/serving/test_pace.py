"""The controller looks often while something changes, and seldom otherwise."""

from cluster.serving.pace import BUSY_S, NUM_BUSY, QUIET_S, Pace


def test_a_settled_cluster_is_looked_at_seldom_and_a_change_at_once_often_again():
    pace = Pace()
    assert pace.after(is_settled=False) == BUSY_S
    assert [pace.after(is_settled=True) for _ in range(NUM_BUSY + 2)] == [BUSY_S] * NUM_BUSY + [QUIET_S] * 2
    assert pace.after(is_settled=False) == BUSY_S
    assert pace.after(is_settled=True) == BUSY_S


def test_what_serve_is_patched_with_is_there():
    """The names of Serve that `install` uses; a new version that renames one would look at its own pace."""
    from ray.serve._private import controller
    from ray.serve._private.common import DeploymentStatus
    from ray.serve._private.deployment_state import DeploymentStateManager

    assert isinstance(controller.CONTROL_LOOP_INTERVAL_S, float)
    assert DeploymentStatus.HEALTHY
    assert callable(DeploymentStateManager.update)
    assert callable(DeploymentStateManager.get_deployment_statuses)
