"""Before the first request: the step budget learns how fast the model is, and the first request does not pay
for what is done only once.
"""

from __future__ import annotations

from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.budget import StepBudget
from cluster.worker.cpu_slots import CpuSlots
from prefill_service.runner import PrefillRunner

MAX_TOKENS = 1024  # in one step


def warm_up(
    runner: PrefillRunner, blocks: BlockPool, budget: StepBudget, cpu_slots: CpuSlots, max_model_len: int
) -> None:
    """Runs on the caller's thread and blocks for a few steps."""
    num_tokens = budget.min_tokens
    max_tokens = min(MAX_TOKENS, blocks.num_free * blocks.block_size, max_model_len)
    while num_tokens <= max_tokens:
        table = blocks.allocate(-(-num_tokens // blocks.block_size))
        for _ in range(2):
            with cpu_slots.acquire():
                runner.warm_up(num_tokens, table)
            budget.observe(num_tokens, 0.0, cpu_slots.ran_s)
        blocks.free(table)
        if num_tokens >= budget.max_tokens(0.0):
            return
        num_tokens = min(2 * num_tokens, budget.max_tokens(0.0))
