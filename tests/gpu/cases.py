"""Steps over paged KV with their answers by plain softmax, for any device: the unit tests run small ones on
the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, capture_cuda
from cluster.model.cuda.step_inputs import StepBuffers, answers_of
from cluster.model.kv_format import KvCacheDtype, LayerCache, kv_segments, layer_cache
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.states import StateSpan
from cluster.model.step_model import StepModel
from tests.unit.model.attention_cases import dense_sequence


@dataclass(frozen=True)
class Heads:
    query: int = 4
    kv: int = 2
    key_width: int = 16
    value_width: int = 16


@dataclass
class PagedCase:
    batch: PagedBatch
    cache: LayerCache
    query: Tensor  # [T, Hq, D]
    new_key: Tensor  # [T, Hk, D]
    new_value: Tensor
    expected: Tensor  # [T, Hq, Dv] float32


def paged_case(
    sizes: Sequence[tuple[int, int]],
    layer: LayerAttention,
    heads: Heads,
    *,
    block_size: int = 4,
    kv_cache_dtype: KvCacheDtype = "auto",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PagedCase:
    """sizes: (computed, new) tokens of each sequence. Tables run backwards through the blocks; unwritten rows
    hold 7."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads.kv, heads.key_width), (heads.kv, heads.value_width)]
    num_blocks = 1 + sum(-(-(old + new) // block_size) for old, new in sizes)
    memory = BlockMemory(
        MemoryLayout(kv_segments(shapes, block_size, dtype, kv_cache_dtype)), num_blocks, device
    )
    for segment in memory.segments:
        segment.fill_(7)
    cache = layer_cache(memory, 0)

    def noise(count: int, num_heads: int, width: int) -> Tensor:
        return torch.randn(count, num_heads, width, generator=generator).to(device, dtype)

    tables, slots, queries, keys, values, expected = [], [], [], [], [], []
    next_block = num_blocks
    for old, new in sizes:
        total = old + new
        first = next_block - -(-total // block_size)
        table = list(range(first, next_block))[::-1]
        next_block = first
        positions = torch.arange(total)
        where = torch.tensor(table)[positions // block_size] * block_size + positions % block_size
        where = where.to(device)
        key, value = noise(total, *shapes[0]), noise(total, *shapes[1])
        query = noise(new, heads.query, heads.key_width)
        cache.write(where, key, value)
        expected.append(
            dense_sequence(
                layer, query, cache.key.rows(where, torch.float32), cache.value.rows(where, torch.float32)
            )
        )
        tables.append(table)
        slots.append(where[old:])
        queries.append(query)
        keys.append(key[old:])
        values.append(value[old:])
    width = max(map(len, tables))
    contexts = [old + new for old, new in sizes]
    batch = PagedBatch(
        memory,
        block_size,
        torch.cat(slots),
        [new for _, new in sizes],
        contexts,
        torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], device=device),
        torch.tensor(contexts, device=device),
        [()] * len(sizes),
    )
    return PagedCase(
        batch, cache, torch.cat(queries), torch.cat(keys), torch.cat(values), torch.cat(expected)
    )


@torch.inference_mode()
def check_recorded_steps(
    model: LanguageModel, num_steps: int, tolerance: float, *, mixed: bool = True
) -> None:
    """On CUDA. A replayed step gives the bits of the same `step` unrecorded: answers and, with `mixed`,
    chunks of a prompt and drafts beside them. `forward` and `decode` have no padding, and the products of
    torch's libraries depend on the number of rows, so these logits are compared by `tolerance`, relative to
    their norm. Every way of computing has KV of its own."""
    num_blocks, size = 60, model.block_size
    replayed, unrecorded, plain = (BlockMemory(model.kv_layout, num_blocks, model.device) for _ in range(3))
    sizes = RecordedSizes.up_to(8, 20 if mixed else 0, 2 if mixed else 0)
    graphed = GraphedModel(model, replayed, sizes, capture_cuda())
    graphed.warm_up()
    assert graphed.records_mixed == mixed
    max_blocks = -(-model.max_model_len // size)
    buffers = StepBuffers(sizes.largest, max_blocks, 1, size, num_blocks - 1, model.device)
    tables = [list(range(12 * i, 12 * i + 12)) for i in range(4)]
    prompts = [list(range(5, 45)), list(range(50, 53)), list(range(60, 100))]
    tokens: list[int] = []
    for kv in (replayed, unrecorded, plain):
        chunks = [
            SequenceChunk(prompt, torch.arange(len(prompt)), 0, table)
            for prompt, table in zip(prompts, tables, strict=False)
        ]
        tokens = model.forward(chunks, kv).argmax(-1).tolist()

    def check(logits: Tensor, same: Tensor, expected: Tensor, what: str) -> None:
        assert torch.equal(logits, same[: len(logits)].float()), what
        assert float((logits - expected).norm() / expected.norm()) < tolerance, what

    for step in range(num_steps):
        contexts = [len(prompt) + step for prompt in prompts]
        arguments = (tokens, contexts, [0] * 3, tables[:3])
        logits = graphed.decode(*arguments, replayed)
        inputs = buffers.fill_answers(answers_of(4), *arguments)  # the recorded size
        check(
            logits, model.step(inputs, unrecorded), model.decode(*arguments, plain), f"answers, step {step}"
        )
        tokens = logits.argmax(-1).tolist()
        if not mixed:
            continue
        last = zip(tokens, contexts, tables, strict=False)
        chunks = [
            SequenceChunk([token, 7, 8], context + 1, context + 1, table, num_logits=3)
            for token, context, table in last
        ]
        chunks.append(SequenceChunk(list(range(5, 16)), 11 * (step % 10), 11 * (step % 10), tables[3]))
        logits = graphed.forward(chunks, replayed)
        held = sizes.mixed[1]  # of 32 tokens
        inputs = buffers.fill_chunks(held, [token for chunk in chunks for token in chunk.token_ids], chunks)
        embeds = torch.zeros(held.num_tokens, model.hidden_size, dtype=model.dtype, device=model.device)
        model.place_embeds(inputs.token_ids, chunks, embeds)
        same = model.step(inputs, unrecorded, embeds)
        check(logits, same, model.forward(chunks, plain), f"mixed, step {step}")


HYBRID_PLACES = 3  # of states, for a sequence of `hybrid_answers`: before and after a step, and within it


def hybrid_answers(
    model: LanguageModel, steps: StepModel, kv: BlockMemory, prompts: Sequence[Sequence[int]],
    num_tokens: int, blocks_of_kv: int,
) -> list[list[int]]:  # fmt: skip
    """Greedy answers of a hybrid model. Each prompt is computed in two chunks next to the answers before it;
    a state is kept within the second. blocks_of_kv: of a sequence, before its states."""
    size, done = model.state_blocks, [0] * len(prompts)
    own = blocks_of_kv + HYBRID_PLACES * size
    lasts: list[Sequence[int]] = [()] * len(prompts)  # where each state is
    answers: list[list[int]] = [[] for _ in prompts]

    def place(i: int, number: int) -> range:
        start = i * own + blocks_of_kv + number * size
        return range(start, start + size)

    def spans(i: int, *counts: int) -> tuple[StateSpan, ...]:
        found, free = (
            [],
            [place(i, number) for number in range(HYBRID_PLACES) if place(i, number) != lasts[i]],
        )
        for count in counts:
            found.append(StateSpan(count, lasts[i], free.pop()))
            lasts[i] = found[-1].target
        return tuple(found)

    def chunk(i: int, ids: Sequence[int], *counts: int, num_logits: int = 1) -> SequenceChunk:
        made = SequenceChunk(
            ids, done[i], done[i], range(i * own, i * own + blocks_of_kv), num_logits=num_logits,
            states=spans(i, *(counts or (len(ids),))),
        )  # fmt: skip
        done[i] += len(ids)
        return made

    for i, prompt in enumerate(prompts):
        half = len(prompt) // 2
        for part in (0, 1):
            chunks = [chunk(j, answers[j][-1:]) for j in range(i)]
            rest = prompt[half:]
            last = chunk(i, rest, 1, len(rest) - 1) if part else chunk(i, prompt[:half], num_logits=0)
            tokens = steps.forward([*chunks, last], kv).argmax(-1).tolist()
            for j, token in enumerate(tokens):
                answers[j].append(token)
    while min(map(len, answers)) < num_tokens:
        count = len(prompts)
        tables = [range(i * own, i * own + blocks_of_kv) for i in range(count)]
        contexts, states = [*done], [spans(i, 1)[0] for i in range(count)]
        given = [answer[-1] for answer in answers]
        tokens = steps.decode(given, contexts, [0] * count, tables, kv, states=states).argmax(-1).tolist()
        for i, token in enumerate(tokens):
            answers[i].append(token)
            done[i] += 1
    return [answer[:num_tokens] for answer in answers]
