"""What runs in place of a model: a chain of numbers in which nothing can be lost, doubled or mixed up.

    row of token p    mixes the row of token p - 1, *as it is in the memory*, with token p's id, or with its
                      embedding row *as it is in the memory*
    next token        mixes the last row, the row of the negative prompt, and the choice's seed

So an answer is a pure function of prompt, media, negative prompt and seed (`answer`), and a foreign or stale
byte changes it. Besides, every read is compared with what the row should be, so that also a byte which no
answer shows is found (`on_foreign`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any
from zlib import crc32

import torch

from cluster.engine.features import FeatureStore
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import accept
from cluster.engine.state import (
    AnswerChoice,
    FirstTokens,
    LanguageRequest,
    PromptWork,
    Work,
    WorkResult,
)
from cluster.kvcache.memory import BlockMemory
from cluster.types.media import MediaItem
from cluster.types.request import GenerateRequest, Prompt
from cluster.worker.blame import bookkeeping
from encoder_service.runner import Piece, Prepared

BLOCK_SIZE = 4
NUM_VALUES = (1 << 61) - 1
NUM_TOKENS = 50_000
STEP_S, TOKEN_S = 0.002, 0.0001  # how long a step of a language engine lasts, and a prompt's token in it


def mix(left: int, right: int) -> int:
    return (left * 6364136223846793005 + right * 1442695040888963407 + 1013904223) % NUM_VALUES


def row_value(media_hash: str, row: int) -> int:
    """What an embedding row of an item holds."""
    return mix(crc32(media_hash.encode()), row)


def values(prompt: Prompt) -> list[int]:
    """What each token adds to the chain."""
    found = list(prompt.token_ids)
    for item in prompt.media:
        for token, row, count in item.pieces(0, len(found)):
            found[token : token + count] = [row_value(item.media_hash, row + i) for i in range(count)]
    return found


@lru_cache(4096)
def rows_of(prompt: Prompt) -> tuple[int, ...]:
    rows, last = [], crc32(prompt.cache_salt.encode())
    for value in values(prompt):
        last = mix(last, value)
        rows.append(last)
    return tuple(rows)


def chain(prompt: Prompt, token_ids: Sequence[int] = ()) -> list[int]:
    """The rows of a prompt and of tokens behind it."""
    rows = list(rows_of(prompt))
    for token_id in token_ids:
        rows.append(mix(rows[-1], token_id))
    return rows


def draw(last_rows: Sequence[int], seed: int) -> int:
    for row in last_rows:
        seed = mix(row, seed)
    return seed % NUM_TOKENS


def answer(request: GenerateRequest, choice_idx: int) -> list[int]:
    """All tokens of a choice: the oracle."""
    seed, stop = request.sampling[choice_idx].seed, request.stop
    lasts = [chain(prompt)[-1] for prompt in request.prompts]
    tokens: list[int] = []
    while len(tokens) < stop.max_tokens:
        tokens.append(draw(lasts, seed))
        lasts = [mix(last, tokens[-1]) for last in lasts]
        if tokens[-1] in stop.stop_token_ids:
            break
    return tokens


class ChainRunner:
    """As `cluster.engine.runner.LanguageRunner`. `on_foreign(memory, request id, block ids)`: these
    blocks were read and do not hold what they should. `compute(seconds)`: lets time pass."""

    num_drafted = num_accepted = 0

    def __init__(
        self,
        kv: BlockMemory,
        features: FeatureStore,
        feature_memory: BlockMemory,
        compute: Callable[[float], None],
        on_foreign: Callable[[BlockMemory, str, Sequence[int]], None],
        draft: Callable[[AnswerChoice], Sequence[bool]] = lambda choice: (),
        is_late: Callable[[], bool] = lambda: False,
    ):
        """`draft`: which of the next guesses are right. `is_late`: whether the mask of a choice is."""
        self.kv = kv
        self.copy_blocks = kv.copy_blocks
        self.run = bookkeeping(self._run)
        self.first_tokens = bookkeeping(self._first_tokens)
        self._in_flight: list[Callable[[], None]] = []  # each writes a row, or a state
        self._num_tokens: dict[AnswerChoice, int] = {}  # of the choices in flight, when they are drawn from
        self._rows = kv.segments[0].view(kv.num_blocks * BLOCK_SIZE).numpy()
        self._features, self._feature_memory = features, feature_memory
        self._compute, self._on_foreign, self._draft, self._is_late = compute, on_foreign, draft, is_late

    def propose(self, requests: Sequence[LanguageRequest]) -> None:
        for request in requests:
            if request.request.guidance is None:
                for choice in request.live_choices:
                    choice.propose(self._guesses(choice))

    def forget(self, choice: AnswerChoice) -> None:
        pass

    def room_for_prompts(self, answers: Sequence[LanguageRequest]) -> None:
        """No step is recorded."""

    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        pass

    def _run(
        self, works: Sequence[Work], on_layer: Callable[[int, Any], None], then: Sequence[AnswerChoice]
    ) -> list[WorkResult]:
        prompts = [work for work in works if isinstance(work, PromptWork)]
        if prompts:
            self.drop_ahead()  # the device computes one after the other
        for work in prompts:
            self._compute_prompt(work)
        self._compute(STEP_S + TOKEN_S * sum(work.num_tokens for work in prompts))
        self.drop_ahead()
        results = [
            WorkResult(tokens=self._continue(work, then))
            if isinstance(work, LanguageRequest)
            else WorkResult(logits=torch.empty(0))
            for work in works
        ]
        if prompts:
            on_layer(0, None)
        return results

    def is_in_flight(self, choice: AnswerChoice) -> bool:
        return self._num_tokens.get(choice) == len(choice.token_ids)

    def drop_ahead(self) -> None:
        """What was enqueued behind the last step is written as late as it may be: when the next step has
        ended, whatever has become of the blocks since then."""
        for write in self._in_flight:
            write()
        self._in_flight = []
        self._num_tokens = {}

    def _compute_prompt(self, work: PromptWork) -> None:
        sequence, prompt = work.sequence, work.sequence.prompt
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + work.num_tokens
        rows = self._checked(work.request_id, sequence.block_table, chain(prompt)[:start])
        last = rows[-1] if rows else crc32(prompt.cache_salt.encode())
        self._move_states(work.request_id, sequence, chain(prompt)[:end], work.num_tokens)
        found = list(prompt.token_ids[start:end])
        for item_idx, item in enumerate(prompt.media):
            for token, row, count in item.pieces(start, end):
                key = work.request_id, item_idx
                found[token - start : token - start + count] = self._embeddings(
                    key, item.media_hash, row, count
                )
        for position, value in enumerate(found, start):
            last = mix(last, value)
            self._write(sequence.block_table, position, last)

    def _embeddings(self, key: tuple[str, int], media_hash: str, row: int, count: int) -> list[int]:
        rows = torch.cat(self._features.rows(key, row, row + count)).flatten().tolist()
        foreign = [row + i for i, value in enumerate(rows) if value != row_value(media_hash, row + i)]
        if foreign:
            block_ids = self._features.copies[key].block_ids
            blocks = sorted({block_ids[each // BLOCK_SIZE] for each in foreign})
            self._on_foreign(self._feature_memory, key[0], blocks)
        return rows

    def _continue(self, request: LanguageRequest, then: Sequence[AnswerChoice]) -> list[list[int]]:
        return [self._next_tokens(request, choice, choice in then) for choice in request.live_choices]

    def _next_tokens(self, request: LanguageRequest, choice: AnswerChoice, goes_on: bool) -> list[int]:
        generated = choice.token_ids[choice.num_prompt_tokens :]
        lasts_of = []
        for sequence in choice.sequences:
            start, length = sequence.num_settled_tokens, sequence.num_prompt_tokens
            assert sequence.num_computed_tokens == length + len(generated) - 1
            wanted = chain(sequence.prompt, generated[: start - length])
            first = sequence.num_dropped * BLOCK_SIZE
            rows = self._checked(request.request_id, sequence.block_table, wanted, first)
            known, num_drafts = generated[start - length :], len(choice.drafts)
            for position, token_id in enumerate([*known, *choice.drafts], start):
                rows.append(mix(rows[-1], token_id))
                self._write(sequence.block_table, position, rows[-1])
            every = [*wanted, *rows[start:]]
            self._move_states(request.request_id, sequence, every, len(known), num_drafts)
            lasts_of.append(rows[-1 - num_drafts :])
        drawn = [draw(lasts, choice.sampling.seed) for lasts in zip(*lasts_of, strict=True)]
        tokens = [] if self._is_late() else accept(choice.drafts, drawn)
        if goes_on and tokens:
            assert len(tokens) == len(drawn), "all drafts are right"
            for sequence, lasts in zip(choice.sequences, lasts_of, strict=True):
                self._enqueue(
                    request.request_id, sequence, len(tokens), lasts[-1], mix(lasts[-1], tokens[-1])
                )
            self._num_tokens[choice] = len(choice.token_ids) + len(tokens)
        choice.drop_drafts()
        return tokens

    def _enqueue(self, request_id: str, sequence: TokenSequence, num_new: int, before: int, row: int) -> None:
        """The forward ahead, of one token: `row`, behind `num_new` tokens whose last row is `before`."""
        table, position = list(sequence.block_table), sequence.num_computed_tokens + num_new
        self._in_flight.append(lambda: self._write(table, position, row))
        for span in sequence.span_ahead():
            self._check_state(request_id, span.source, before)  # what the step has left, on the same device
            self._in_flight.append(partial(self._write_state, list(span.target), row))

    def _first_tokens(self, requests: Sequence[LanguageRequest]) -> list[FirstTokens]:
        tokens: list[FirstTokens] = []
        for request in requests:
            assert request.is_complete
            lasts = [
                self._checked(request.request_id, sequence.block_table, chain(sequence.prompt))[-1]
                for sequence in request.sequences
            ]
            seeds = [sampling.seed for sampling in request.request.sampling]
            tokens.append(FirstTokens(tuple(draw(lasts, seed) for seed in seeds)))
        return tokens

    def _guesses(self, choice: AnswerChoice) -> list[int]:
        room = choice.stop.max_tokens - choice.num_generated - 1
        guesses: list[int] = []
        generated = choice.token_ids[choice.num_prompt_tokens :]
        lasts = [chain(sequence.prompt, generated)[-1] for sequence in choice.sequences]
        for is_right in self._draft(choice)[: max(0, room)]:
            right = draw(lasts, choice.sampling.seed)
            guesses.append(right if is_right else (right + 1) % NUM_TOKENS)
            lasts = [mix(last, guesses[-1]) for last in lasts]
        return guesses

    def _checked(
        self, request_id: str, block_table: Sequence[int], wanted: Sequence[int], first: int = 0
    ) -> list[int]:
        """The rows of the first tokens, as they are in the memory; before `first` they are not held."""
        rows: list[int] = []
        for block_id in block_table[: -(-len(wanted) // BLOCK_SIZE)]:
            rows += self._rows[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE].tolist()
        del rows[len(wanted) :]
        if rows[first:] != list(wanted[first:]):
            places = [p for p in range(first, len(wanted)) if p >= len(rows) or rows[p] != wanted[p]]
            self._on_foreign(self.kv, request_id, sorted({block_table[p // BLOCK_SIZE] for p in places}))
        return rows

    def _move_states(
        self,
        request_id: str,
        sequence: TokenSequence,
        rows: Sequence[int],
        num_tokens: int,
        num_drafts: int = 0,
    ) -> None:
        """rows: of all tokens, the new ones and the drafts behind them included. A state is the last row, in
        every row of its blocks, mixed with its place."""
        at = len(rows) - num_tokens - num_drafts
        for span in sequence.state_spans(num_tokens, num_drafts):
            self._check_state(request_id, span.source, rows[at - 1])
            at += span.num_tokens
            self._write_state(span.target, rows[at - 1])

    def _check_state(self, request_id: str, block_ids: Sequence[int], row: int) -> None:
        for i, block_id in enumerate(block_ids):
            if (self._rows[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] != mix(row, i)).any():
                self._on_foreign(self.kv, request_id, [block_id])

    def _write_state(self, block_ids: Sequence[int], row: int) -> None:
        for i, block_id in enumerate(block_ids):
            self._rows[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = mix(row, i)

    def _write(self, block_table: Sequence[int], position: int, value: int) -> None:
        self._rows[block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = value


class ChainEncoder:
    """As `encoder_service.runner.EncoderRunner`. `compute(seconds)`: lets time pass."""

    def __init__(self, compute: Callable[[float], None]):
        self._compute = compute

    def prepare(self, item: MediaItem, is_wanted: Callable[[], bool]) -> Prepared:
        grid = item.geometry.grid_thw
        rows = [[row_value(item.media_hash, row)] for row in range(item.geometry.num_tokens)]
        return Prepared({"rows": torch.tensor(rows)}, 1 if grid is None else grid[0])

    def record_next(self) -> bool:
        return False

    def encode(self, modality: Any, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        self._compute(0.004)
        outputs = []
        for piece in pieces:
            rows, num_units = piece.prepared.tensors["rows"], piece.prepared.num_units
            outputs.append(rows[piece.start * len(rows) // num_units : piece.end * len(rows) // num_units])
        return outputs
