"""Serve's request router for the worker pools. Runs in every process that holds a handle to a pool, on
Serve's router thread.

It has two jobs:

* It reports to this process's `Membership` which replicas Serve lists.
* It sends a call to the replica that the caller chose (`handle.options(session_id=replica_id)`). If the
  replica is gone, the call fails at once.

Serve pickles this class by value, so a module global here would be a copy. Shared state is therefore imported
inside methods. Two things would hang every later call of the process and are avoided: an exception from
`choose_replicas`, and an answer without candidates unless `should_backoff` is set.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class HookRouter(RequestRouter):
    def initialize_state(self, role: str) -> None:
        self._role = role

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        if not chosen and not pending_request.future.done():
            from cluster.errors import UnavailableError

            pending_request.future.set_exception(UnavailableError(f"{self._role} replica {wanted} is gone"))
        return [chosen or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        from cluster.types.members import Role
        from deploy.serving.membership import MEMBERSHIP, decode_members

        MEMBERSHIP.publish(Role(self._role), decode_members(each.replica_metadata for each in replicas))
