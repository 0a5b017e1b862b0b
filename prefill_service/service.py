"""One prefill worker process: it computes prompts and sends their KV to the workers that generate the
answers."""

from __future__ import annotations

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from cluster.worker.process import LEASE_MARGIN_S


class PrefillService(LanguageWorker):
    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        super().__init__(args, replica_id, Role.PREFILL, lease_margin_s)
