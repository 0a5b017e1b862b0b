"""What runs in place of a language model: it writes recognisable KV, checks all that it reads, so that a
block reused too early is found, and says the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cluster.engine.features import FeatureStore
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
from cluster.worker.blame import bookkeeping
from tests.fakes.kv_rows import check_tokens, write_token
from tests.fakes.requests import first_token, item_value, kv_value


def prompts_in(works: Sequence[Work]) -> list[PromptWork]:
    return [work for work in works if isinstance(work, PromptWork)]


def answers_in(works: Sequence[Work]) -> list[LanguageRequest]:
    return [work for work in works if isinstance(work, LanguageRequest)]


class ScriptedRunner:
    """`on_prompts`, `on_answers`: what happens while a step with prompts, or answers, is computed. `draft`:
    the guesses at what follows a choice."""

    def __init__(
        self,
        kv: BlockMemory,
        features: FeatureStore,
        on_prompts: Callable[[], Any] = lambda: None,
        on_answers: Callable[[], Any] = lambda: None,
        draft: Callable[[AnswerChoice], list[int]] = lambda choice: [],
    ):
        self.kv = kv
        self.num_drafted = self.num_accepted = 0
        self.num_ahead = 0  # steps behind which a forward was enqueued
        self._in_flight: list[tuple[list[int], int, int]] = []
        self._num_tokens: dict[AnswerChoice, int] = {}  # of the choices in flight, when they are drawn from
        self._features = features
        self._on_prompts, self._on_answers = on_prompts, on_answers
        self._draft = draft
        self.copy_blocks = kv.copy_blocks
        self.run = bookkeeping(self._run)  # what is wrong with memory ends the engine
        self.first_tokens = bookkeeping(self._first_tokens)

    def propose(self, requests: Sequence[LanguageRequest]) -> None:
        for request in requests:
            for choice in request.live_choices if request.request.guidance is None else ():
                room = choice.stop.max_tokens - choice.num_generated - 1
                choice.propose(self._draft(choice)[:room])

    def forget(self, choice: AnswerChoice) -> None:
        pass

    def room_for_prompts(self, answers: Sequence[LanguageRequest]) -> None:
        """No step is recorded."""

    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        pass

    def _run(
        self, works: Sequence[Work], on_layer: Callable[[int, Any], None], then: Sequence[AnswerChoice] = ()
    ) -> list[WorkResult]:
        self._write_late()
        self._num_tokens = {}
        prompts, answers = prompts_in(works), answers_in(works)
        assert list(works) == [*answers, *prompts]
        for work in prompts:
            self.compute_prompt(work)
        if prompts:
            self._on_prompts()
        if answers:
            self._on_answers()
        news = {choice: len(choice.drafts) + 1 for choice in then}
        results = [WorkResult(tokens=self.answer(request)) for request in answers]
        self._in_flight = [
            (
                list(sequence.block_table),
                sequence.num_computed_tokens + num_new,
                choice.token_ids[-1] + num_new,
            )
            for choice, num_new in news.items()
            for sequence in choice.sequences
        ]
        for choice in then:
            for sequence in choice.sequences:
                sequence.span_ahead()
        self._num_tokens = {choice: len(choice.token_ids) + num_new for choice, num_new in news.items()}
        self.num_ahead += bool(then)
        if prompts:
            on_layer(0, None)
        return results + [WorkResult(logits=torch.empty(0))] * len(prompts)

    def is_in_flight(self, choice: AnswerChoice) -> bool:
        return self._num_tokens.get(choice) == len(choice.token_ids)

    def drop_ahead(self) -> None:
        self._write_late()

    def _write_late(self) -> None:
        """What was enqueued behind the last step is written as late as it may be: whatever has become of the
        blocks since then."""
        for block_table, position, token_id in self._in_flight:
            write_token(self.kv, block_table, position, token_id)
        self._in_flight = []

    def compute_prompt(self, work: PromptWork) -> None:
        sequence, prompt = work.sequence, work.sequence.prompt
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + work.num_tokens
        for item_idx, item in enumerate(prompt.media):
            for _, row, count in item.pieces(start, end):
                rows = self._features.rows((work.request_id, item_idx), row, row + count)
                expected = [item_value(item.media_hash, i) for i in range(row, row + count)]
                assert torch.cat(rows).flatten().tolist() == expected
        check_tokens(self.kv, sequence.block_table, prompt, start)
        for position in range(start, end):
            write_token(self.kv, sequence.block_table, position, kv_value(prompt, position))

    def answer(self, request: LanguageRequest) -> list[list[int]]:
        """Checks every sequence's prompt and answer, writes what a model would, says the next number."""
        answer: list[list[int]] = []
        for choice in request.live_choices:
            generated = choice.token_ids[choice.num_prompt_tokens :]
            for sequence in choice.sequences:
                num_prompt_tokens, computed = sequence.num_prompt_tokens, generated[:-1]
                assert sequence.num_computed_tokens == num_prompt_tokens + len(computed)
                check_tokens(self.kv, sequence.block_table, sequence.prompt, num_prompt_tokens, computed)
                for i, token_id in enumerate((generated[-1], *choice.drafts)):
                    position = sequence.num_computed_tokens + i
                    write_token(self.kv, sequence.block_table, position, token_id)
            drawn = [token_id + 1 for token_id in (choice.token_ids[-1], *choice.drafts)]
            answer.append(accept(choice.drafts, drawn))
            choice.drop_drafts()
        return answer

    @staticmethod
    def _first_tokens(requests: Sequence[LanguageRequest]) -> list[FirstTokens]:
        tokens: list[FirstTokens] = []
        for request in requests:
            assert request.is_complete
            token_id = first_token(request.main.prompt.token_ids[-1])
            tokens.append(FirstTokens((token_id,) * len(request.request.sampling)))
        return tokens
