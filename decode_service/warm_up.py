"""Before the first request: measures how long a step takes, by the number of its sequences and the tokens
that they see.
"""

from __future__ import annotations

from itertools import product

from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.fit import StepFit
from cluster.worker.cpu_slots import CpuSlots
from decode_service.runner import DecodeRunner

CONTEXTS = (16, 512)  # tokens of a sequence
MANY_SEQUENCES = 16
NUM_ROUNDS = 3


def warm_up(
    runner: DecodeRunner,
    blocks: BlockPool,
    fit: StepFit,
    cpu_slots: CpuSlots,
    max_batch_sequences: int,
    max_model_len: int,
) -> None:
    """Runs on the caller's thread and blocks for a dozen steps."""
    table = blocks.allocate(min(max(CONTEXTS) // blocks.block_size + 1, blocks.num_free))
    max_context = min(len(table) * blocks.block_size, max_model_len) - 1
    contexts = [min(context, max_context) for context in CONTEXTS]
    sizes = list(product(contexts, (1, min(MANY_SEQUENCES, max_batch_sequences))))
    for round_idx in range(NUM_ROUNDS):
        for context, num_sequences in sizes:
            with cpu_slots.acquire():
                runner.warm_up(num_sequences, context, table)
            if round_idx > 0:  # the first round includes what is done only once
                fit.observe(num_sequences, context, cpu_slots.ran_s)
    blocks.free(table)
