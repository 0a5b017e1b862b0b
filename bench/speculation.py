"""What speculative decoding saves: tokens per forward of the model, and time per token, with and without
drafts.

    python -m bench.speculation --concurrency 1 8

One process, no cluster. The demo model answers text questions, and one question again and again in the same
conversation. Every row decodes the same prompts with the same seeds; its tokens are compared with those of
the row without drafts. Rounds of the rows are interleaved, times are medians over rounds. The draft model is
the first layers of the demo model, which were not trained to predict tokens by themselves: the row shows the
cost of a draft model, not the gain of a good one. `--eagle3 FOLDER` adds a head, as `bench.draft_training`
writes one. Its target keeps hidden rows, so a step does not run in one native call there: the row includes
that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench import DEMO_MODEL
from bench.arguments import parser_of
from cluster.config.checkpoint import read_config
from cluster.config.draft_heads import read_eagle3
from cluster.engine.head_drafts import HeadProposer
from cluster.engine.speculation import (
    DraftModelProposer,
    KnownTokens,
    NgramProposer,
    Proposer,
    RowReader,
    Speculator,
    accept,
)
from cluster.kvcache.memory import BlockMemory
from cluster.model.eagle3 import load_eagle3
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.loading import Half, load_half
from cluster.model.sampling import sample
from cluster.model.support import family_of
from cluster.types.request import SamplingParams
from deploy.demo_model.training import data

BLOCK_SIZE = 16
KEPT_ROWS = 4096  # of a step
TASKS = ("answers", "copies")
SAMPLINGS = {"greedy": 0.0, "sampled": 0.7}  # temperature


@dataclass
class DecodingRequest:
    """One in-flight request."""

    request_id: str
    token_ids: list[int]  # prompt and generated
    sampling: SamplingParams
    max_len: int  # tokens, prompt included
    stop_token_ids: tuple[int, ...]
    block_table: list[int]

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= self.max_len or self.token_ids[-1] in self.stop_token_ids

    def chunk(self, drafts: Sequence[int]) -> SequenceChunk:
        """The last token and its drafts."""
        start = len(self.token_ids) - 1
        positions = torch.arange(start, start + 1 + len(drafts))
        return SequenceChunk(
            [self.token_ids[-1], *drafts], positions, start, self.block_table, num_logits=len(positions)
        )


@dataclass
class ProposerResult:
    """One round of one proposer over all prompts."""

    tokens: list[list[int]] = field(default_factory=list)  # per request, prompt included
    num_generated: int = 0
    num_rows: int = 0  # one per request and step
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0


def make_prompts(tokenizer: Any, task: str, num_prompts: int) -> list[list[int]]:
    """answers: questions that the demo model was trained on. copies: a conversation whose next answer repeats
    the earlier ones.
    """
    rng = random.Random(7)
    prompts = []
    for _ in range(num_prompts):
        turn = data.text_question(rng) if task == "answers" else _count(rng.randrange(4))
        question = {"role": "user", "content": turn.question}
        answer = {"role": "assistant", "content": turn.answer}
        messages = [*([question, answer] * 3 if task == "copies" else []), question]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def _count(first: int) -> data.Turn:
    numbers = [str(number) for number in range(first, first + 8)]
    return data.Turn(f"Count from {numbers[0]} to {numbers[-1]}.", ", ".join(numbers) + ".")


def first_layers(num_layers: int) -> LanguageModel:
    """The demo model without its last layers."""
    model = load_half(DEMO_MODEL, Half.LANGUAGE, dtype=torch.float32, device="cpu")
    text = getattr(model.model, family_of(model.config).text_module)
    text.layers = text.layers[:num_layers]
    text.config.num_hidden_layers = num_layers
    return LanguageModel.from_model(model, block_size=BLOCK_SIZE)


@dataclass(frozen=True)
class Way:
    """How one row decodes."""

    model: LanguageModel
    make: Callable[[], Proposer] | None  # None: without drafts


def eagle3_way(folder: Path) -> Way:
    model = LanguageModel.load(DEMO_MODEL, dtype=torch.float32, block_size=BLOCK_SIZE)
    read = read_eagle3(folder, read_config(DEMO_MODEL))
    rows = HiddenRows(KEPT_ROWS, model.hidden_size, model.dtype, model.device, read.layers)
    model.keep_rows(rows)
    head = load_eagle3(read, model)
    return Way(model, lambda: HeadProposer(head, rows, num_blocks=512))


def start(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    temperature: float,
    args: argparse.Namespace,
    reader: RowReader | None,
) -> tuple[list[DecodingRequest], BlockMemory]:
    """Computes the KV of every prompt token but the last."""
    stop = () if args.ignore_eos else model.eos_token_ids
    width = -(-(max(map(len, prompts)) + args.num_tokens) // BLOCK_SIZE)
    kv = BlockMemory(model.kv_layout, width * len(prompts))
    running = [
        DecodingRequest(
            str(i),
            list(prompt),
            SamplingParams(temperature, seed=i),
            len(prompt) + args.num_tokens,
            stop,
            list(range(i * width, (i + 1) * width)),
        )
        for i, prompt in enumerate(prompts)
    ]
    for r in running:
        num_tokens = len(r.token_ids) - 1
        model.forward([SequenceChunk(r.token_ids[:-1], torch.arange(num_tokens), 0, r.block_table)], kv)
        if reader is not None:
            reader.take([KnownTokens(r, (), 0, 0, num_tokens, is_prompt=True)])
    return running, kv


def generate(
    model: LanguageModel,
    running: Sequence[DecodingRequest],
    kv: BlockMemory,
    speculator: Speculator | None,
    result: ProposerResult,
) -> None:
    """Runs the requests together until each has ended, and adds counts and times to `result`."""
    live = list(running)
    num_prompt_tokens = sum(len(r.token_ids) for r in running)
    started_at = time.perf_counter()
    while live:
        step(model, live, kv, speculator, result)
        for ended in [r for r in live if r.is_done]:
            live.remove(ended)
            if speculator is not None:
                speculator.forget(ended.request_id)
    result.seconds += time.perf_counter() - started_at
    result.tokens += [r.token_ids for r in running]
    result.num_generated += sum(len(r.token_ids) for r in running) - num_prompt_tokens


def step(
    model: LanguageModel,
    live: Sequence[DecodingRequest],
    kv: BlockMemory,
    speculator: Speculator | None,
    result: ProposerResult,
) -> None:
    """One forward of the model for every request, as the decode worker does it."""
    drafts: list[list[int]] = [[] for _ in live]
    if speculator is not None:
        drafts = speculator.propose(live, [r.max_len - len(r.token_ids) - 1 for r in live])
    if any(drafts):
        logits = model.forward([r.chunk(draft) for r, draft in zip(live, drafts, strict=True)], kv)
    else:
        contexts = [len(r.token_ids) - 1 for r in live]
        last, tables = [r.token_ids[-1] for r in live], [r.block_table for r in live]
        logits = model.decode(last, contexts, [0] * len(live), tables, kv)
    rows = [
        (r, len(r.token_ids) + i)
        for r, draft in zip(live, drafts, strict=True)
        for i in range(len(draft) + 1)
    ]
    drawn = iter(sample(logits, [r.sampling for r, _ in rows], [position for _, position in rows]))
    known, first_row = [], 0
    for request, draft in zip(live, drafts, strict=True):
        tokens = accept(draft, [next(drawn) for _ in range(len(draft) + 1)])
        if speculator is not None and draft:
            speculator.observe(request.request_id, len(draft), len(tokens) - 1)
        known.append(KnownTokens(request, (), len(request.token_ids) - 1, first_row, len(tokens), False))
        first_row += len(draft) + 1
        result.num_rows += 1
        result.num_drafted += len(draft)
        result.num_accepted += len(tokens) - 1
        for token in tokens:
            request.token_ids.append(token)
            if request.is_done:
                break
    if speculator is not None and speculator.reader is not None:
        speculator.reader.take(known)


def measure(
    ways: dict[str, Way],
    prompts: Sequence[list[int]],
    concurrency: int,
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, list[ProposerResult]]:
    """`args.rounds` results of every way, interleaved. `concurrency` requests run together."""
    results: dict[str, list[ProposerResult]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            proposer = None if way.make is None else way.make()
            reader = proposer if isinstance(proposer, HeadProposer) else None
            speculator = None if proposer is None else Speculator(proposer, args.max_draft_tokens, reader)
            result = ProposerResult()
            for first in range(0, len(prompts), concurrency):
                some = prompts[first : first + concurrency]
                running, kv = start(way.model, some, temperature, args, reader)
                generate(way.model, running, kv, speculator, result)
            results[name].append(result)
    return results


def report(results: dict[str, list[ProposerResult]], labels: dict[str, object]) -> bool:
    """Prints a line for each proposer. Returns whether all tokens equal those without drafts."""
    plain = results["none"][0]
    plain_s = statistics.median(r.seconds for r in results["none"])
    all_equal = True
    for name, rounds in results.items():
        one, seconds = rounds[0], statistics.median(r.seconds for r in rounds)
        equal = all(r.tokens == plain.tokens for r in rounds)
        all_equal &= equal
        line = {
            **labels,
            "drafts": name,
            "tokens": one.num_generated,
            "tokens_per_forward": round(one.num_generated / one.num_rows, 2),
            "acceptance": round(one.num_accepted / one.num_drafted, 2) if one.num_drafted else None,
            "ms_per_token": round(1000 * seconds / one.num_generated, 3),
            "speedup": round(plain_s / seconds, 2),
            "equal": equal,
        }
        print(json.dumps(line))
    return all_equal


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=96, help="generated at most, per request")
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the answer")
    parser.add_argument("--max-draft-tokens", type=int, default=4)
    parser.add_argument("--draft-layers", type=int, default=2, help="layers of the draft model")
    parser.add_argument("--eagle3", type=Path, help="folder of an EAGLE-3 head for the demo model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = LanguageModel.load(DEMO_MODEL, dtype=torch.float32, block_size=BLOCK_SIZE)
    draft = first_layers(args.draft_layers)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ways = {
        "none": Way(model, None),
        "n-gram": Way(model, NgramProposer),
        "draft model": Way(model, lambda: DraftModelProposer(draft, model, num_blocks=512)),
    }
    if args.eagle3 is not None:
        ways["eagle3"] = eagle3_way(args.eagle3)
        ways["none, rows kept"] = Way(ways["eagle3"].model, None)
    all_equal = True
    for concurrency in args.concurrency:
        for task in TASKS:
            for name, temperature in SAMPLINGS.items():
                prompts = make_prompts(tokenizer, task, args.num_prompts)
                results = measure(ways, prompts, concurrency, temperature, args)
                all_equal &= report(results, {"requests": concurrency, "task": task, "sampling": name})
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
