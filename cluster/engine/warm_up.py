"""Before the first request: the engine learns how long steps take, and the first request does not pay for
what is done only once.
"""

from __future__ import annotations

from itertools import product

from cluster.engine.runner import LanguageRunner
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.fit import StepFit
from cluster.worker.cpu_slots import CpuSlots

MAX_PROMPT_TOKENS = 1024  # in one step
MIN_PROMPT_TOKENS = 128  # in the largest step of a worker that computes few prompts
CONTEXTS = (16, 512)  # tokens that a sequence of an answer sees
MANY_SEQUENCES = 16
NUM_ROUNDS = 2
LEAST_GROWTH = 1.5


def warm_up_prompts(
    runner: LanguageRunner, blocks: BlockPool, budget: StepBudget, cpu_slots: CpuSlots, max_tokens: int
) -> None:
    """Steps over prompts, each twice as long as the one before, up to `max_tokens` and to what a recorded
    step holds. Runs on the caller's thread and blocks for a few steps."""
    num_tokens = budget.min_tokens
    max_tokens = min(
        max_tokens, blocks.num_free * blocks.block_size, runner.room_for_prompts(()) or max_tokens
    )
    is_first = True  # this step includes what is done only once
    while num_tokens <= max_tokens:
        table = blocks.allocate(-(-num_tokens // blocks.block_size))
        for _ in range(1 + is_first):
            with cpu_slots.acquire():
                runner.warm_up_prompt(num_tokens, table)
        budget.observe(num_tokens, 0.0, cpu_slots.ran_s)
        is_first = False
        blocks.free(table)
        longest = budget.max_tokens(0.0)
        if longest < LEAST_GROWTH * num_tokens:  # a step that takes as long again would tell little more
            return
        num_tokens = min(2 * num_tokens, longest)


def warm_up_answers(
    runner: LanguageRunner,
    blocks: BlockPool,
    fit: StepFit,
    cpu_slots: CpuSlots,
    max_sequences: int,
    max_model_len: int,
) -> None:
    """Steps of few and many sequences, of short and long ones. Runs on the caller's thread and blocks for a
    dozen steps."""
    table = blocks.allocate(min(max(CONTEXTS) // blocks.block_size + 1, blocks.num_free))
    max_context = min(len(table) * blocks.block_size, max_model_len) - 1
    contexts = [min(context, max_context) for context in CONTEXTS]
    sizes = list(product(contexts, (1, min(MANY_SEQUENCES, max_sequences))))
    for idx, (context, num_sequences) in enumerate([sizes[-1], *sizes * NUM_ROUNDS]):
        with cpu_slots.acquire():
            runner.warm_up_answers(num_sequences, context, table)
        if idx > 0:  # the first and largest step includes what is done only once
            fit.observe(num_sequences, context, cpu_slots.ran_s)
    blocks.free(table)
