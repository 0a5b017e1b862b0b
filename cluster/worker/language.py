"""What prefill and decode workers begin with: the language half of the model, and memory for its KV that is known to fit."""

from __future__ import annotations

import logging

from cluster.config.settings import ClusterArgs
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel
from cluster.worker.memory_plan import MemoryPlan, available_bytes, step_bytes
from cluster.worker.setup import WorkerSetup

logger = logging.getLogger(__name__)


def load_language(
    args: ClusterArgs,
    setup: WorkerSetup,
    *,
    num_kv_blocks: int,
    feature_bytes: int,
    max_step_tokens: int,
    max_step_sequences: int,
) -> tuple[LanguageModel, BlockMemory]:
    """Blocks while the weights are read. Raises ConfigError for a model that is not supported, or memory that is not there."""
    model = LanguageModel.load(
        args.model,
        dtype=setup.dtype,
        device=setup.device,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
        weight_dtype=args.weight_dtype,
    )
    plan = MemoryPlan(
        weights=model.weight_bytes,
        kv_per_token=model.kv_layout.block_bytes // args.block_size,
        num_kv_tokens=num_kv_blocks * args.block_size,
        features=feature_bytes,
        step=step_bytes(
            max_step_tokens, model.hidden_size, model.vocab_size, max_step_sequences, setup.dtype.itemsize
        ),
    )
    available = available_bytes(setup.device)
    plan.check(available)
    logger.info("%s: memory\n%s", setup.replica_id, plan.describe(available))
    return model, BlockMemory(model.kv_layout, num_kv_blocks, setup.device)
