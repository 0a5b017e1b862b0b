"""One prefill worker process: a language engine that computes prompts and sends their KV to the workers that
generate the answers. It has no open Serve calls: to Serve it always looks idle."""

from __future__ import annotations

from functools import partial

from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role

prefill_worker = partial(LanguageWorker, Role.PREFILL)
