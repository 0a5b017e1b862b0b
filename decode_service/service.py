"""One worker process that generates answers: a language engine, and the Serve calls of its requests."""

from __future__ import annotations

from functools import partial

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker, LoadEncoder
from cluster.types.members import Role
from cluster.worker.process import LEASE_MARGIN_S
from cluster.worker.setup import WorkerSetup
from decode_service.calls import GenerationCalls


def decode_worker(
    args: ClusterArgs,
    setup: WorkerSetup,
    *,
    role: Role = Role.DECODE,
    load_encoder: LoadEncoder | None = None,
    lease_margin_s: float = LEASE_MARGIN_S,
) -> LanguageWorker:
    """A worker of the decode pool, or of another pool whose workers generate answers."""
    calls = GenerationCalls()
    return LanguageWorker(
        role, args, setup, load_encoder=load_encoder, calls=calls, lease_margin_s=lease_margin_s
    )


# It computes prompts, too: any prompt, for itself or for other workers.
language_worker = partial(decode_worker, role=Role.LANGUAGE)
