"""What the largest step takes of a GPU, measured: of torch's memory, with what its libraries keep there.

Run once before KV is sized, over a block of its own, and once more when all memory is allocated: a worker
that cannot compute its largest step fails at the start. Other processes' memory does not count. No GPU has
run it.
"""

from __future__ import annotations

import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.types.request import SamplingParams


def measured_step_bytes(model: LanguageModel, num_tokens: int, num_sequences: int) -> int:
    """Bytes that `run_largest_step` takes beside what stays afterwards. Blocks."""
    kv = BlockMemory(model.kv_layout, 1, model.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    run_largest_step(model, kv, num_tokens, num_sequences)
    peak = torch.cuda.max_memory_reserved(model.device)
    torch.cuda.empty_cache()
    return peak - torch.cuda.memory_reserved(model.device)


@torch.inference_mode()
def run_largest_step(model: LanguageModel, kv: BlockMemory, num_tokens: int, num_sequences: int) -> None:
    """An unrecorded step of so many tokens in so many sequences, the first of them behind the longest
    context, and its draws with filters. It belongs to no request: all KV is block 0. Waits for the device.
    Raises torch.OutOfMemoryError."""
    num_sequences = max(min(num_sequences, num_tokens), -(-num_tokens // model.max_model_len))
    shares = [num_tokens // num_sequences + (i < num_tokens % num_sequences) for i in range(num_sequences)]
    befores = [model.max_model_len - shares[0]] + [0] * (num_sequences - 1)
    chunks = [
        SequenceChunk([0] * count, before, before, [0] * -(-(before + count) // model.block_size))
        for count, before in zip(shares, befores, strict=True)
    ]
    logits = model.forward(chunks, kv)
    sample(logits, [SamplingParams(temperature=1.0, top_k=20, top_p=0.8)] * len(logits), range(len(logits)))
    torch.cuda.synchronize(model.device)
