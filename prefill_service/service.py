"""One prefill worker process: it computes prompts and sends their KV to the workers that generate the
answers."""

from __future__ import annotations

from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role


class PrefillService(LanguageWorker):
    role = Role.PREFILL
