"""Requests decoded by hand on tiny models, with the drafts of a proposer or without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import transformers as hf

from cluster.engine.speculation import KnownTokens, Proposer, RowReader, accept
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.types.request import SamplingParams

BLOCK_SIZE = 4
NUM_TOKENS = 36
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8, seed=11),
    "top_p": SamplingParams(temperature=0.6, top_p=0.7, seed=12),
    "min_p": SamplingParams(temperature=0.9, min_p=0.2, seed=13),
    "near_greedy": SamplingParams(temperature=0.05, seed=14),
}


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams = SAMPLINGS["greedy"]
    drafts: list[list[int]] = field(default_factory=list)  # what was proposed, step by step
    table: list[int] = field(default_factory=list)
    start: int = 0  # length of the prompt
    end: int = 0  # length at which it is done


def tiny_model(vocab_size: int, seed: int, initializer_range: float = 0.3) -> LanguageModel:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        initializer_range=initializer_range, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LanguageModel.from_model(hf.LlamaForCausalLM(config).float(), block_size=BLOCK_SIZE)


def requests_of(model: LanguageModel) -> list[Request]:
    """Prompts of several lengths, half of them repetitive, one for each way to draw."""
    rng = random.Random(3)
    made = []
    for i, (name, sampling) in enumerate(SAMPLINGS.items()):
        phrase = [rng.randrange(model.vocab_size) for _ in range(5 + 3 * i)]
        made.append(Request(name, phrase * (1 + i % 2 * 3), sampling))
    return made


def decode(
    model: LanguageModel,
    requests: Sequence[Request],
    proposer: Proposer | None = None,
    num_tokens: int = NUM_TOKENS,
    max_draft: int = 4,
    reader: RowReader | None = None,
) -> list[list[int]]:
    """Generates `num_tokens` for every request, as an engine would; without a proposer by
    `LanguageModel.decode`."""
    width = -(-max(len(r.token_ids) + num_tokens for r in requests) // BLOCK_SIZE)
    kv = BlockMemory(model.kv_layout, width * len(requests))
    for i, request in enumerate(requests):
        request.start, request.end = len(request.token_ids), len(request.token_ids) + num_tokens
        request.table = list(range(i * width, (i + 1) * width))
    model.forward([chunk_of(r.token_ids[:-1], 0, r.table) for r in requests], kv)
    if reader is not None:
        counts = [len(r.token_ids) - 1 for r in requests]
        reader.take(known_of(requests, [0] * len(requests), counts, counts, is_prompt=True))
    while running := [r for r in requests if len(r.token_ids) < r.end]:
        step(model, kv, running, proposer, max_draft, reader)
        for request in running:
            if proposer is not None and len(request.token_ids) == request.end:
                proposer.forget(request.request_id)
    return [r.token_ids[r.start :] for r in requests]


def step(
    model: LanguageModel,
    kv: BlockMemory,
    running: list[Request],
    proposer: Proposer | None,
    max_draft: int,
    reader: RowReader | None = None,
) -> None:
    lens = [len(r.token_ids) for r in running]
    drafts: list[list[int]] = [[] for _ in running]
    if proposer is None:
        last, contexts = [r.token_ids[-1] for r in running], [n - 1 for n in lens]
        logits = model.decode(last, contexts, [0] * len(lens), [r.table for r in running], kv)
    else:
        room = [min(max_draft, r.end - n - 1) for r, n in zip(running, lens, strict=True)]
        drafts = proposer.propose(running, room)
        assert all(len(guess) <= most for guess, most in zip(drafts, room, strict=True))
        batch = zip(running, drafts, strict=True)
        chunks = [
            chunk_of([r.token_ids[-1], *guess], len(r.token_ids) - 1, r.table, len(guess) + 1)
            for r, guess in batch
        ]
        logits = model.forward(chunks, kv)
    rows = [
        (r, n + i) for r, n, guess in zip(running, lens, drafts, strict=True) for i in range(len(guess) + 1)
    ]
    drawn = iter(sample(logits, [r.sampling for r, _ in rows], [position for _, position in rows]))
    for request, guess in zip(running, drafts, strict=True):
        request.token_ids += accept(guess, [next(drawn) for _ in range(len(guess) + 1)])
        request.drafts.append(guess)
    if reader is not None:
        starts, sizes = [n - 1 for n in lens], [len(guess) + 1 for guess in drafts]
        counts = [len(r.token_ids) - n for r, n in zip(running, lens, strict=True)]
        reader.take(known_of(running, starts, counts, sizes))


def known_of(
    requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], sizes: Sequence[int],
    *, is_prompt: bool = False,
) -> list[KnownTokens]:  # fmt: skip
    """Of a step with sizes[i] tokens of request i, the first counts[i] of which are known, from starts[i]
    on."""
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        KnownTokens(request, (), start, first, count, is_prompt)
        for request, start, first, count in zip(requests, starts, firsts, counts, strict=True)
    ]


def chunk_of(
    token_ids: Sequence[int], start: int, table: Sequence[int], num_logits: int = 1
) -> SequenceChunk:
    return SequenceChunk(
        token_ids, torch.arange(start, start + len(token_ids)), start, table, num_logits=num_logits
    )
