"""With drafts or without, the same tokens; how long drafts are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine import speculation
from cluster.engine.runner import LanguageRunner
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import REST_STEPS, DraftModelProposer, NgramProposer, Speculator, accept
from cluster.engine.state import LanguageRequest
from cluster.engine.timing import Stopwatch
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.engine.drafting import (
    BLOCK_SIZE,
    NUM_TOKENS,
    Request,
    chunk_of,
    decode,
    requests_of,
    tiny_model,
)


class Oracle:
    """Knows what comes, and is wrong at random."""

    def __init__(self, answers: dict[str, list[int]], seed: int, error_ratio: float):
        self._answers, self._rng, self._error_ratio = answers, random.Random(seed), error_ratio

    def propose(self, sequences, max_tokens):
        return [self._guess(s, most) for s, most in zip(sequences, max_tokens, strict=True)]

    def _guess(self, sequence, most):
        truth = self._answers[sequence.request_id][len(sequence.token_ids) :][: self._rng.randint(0, most)]
        return [(t + 1) % 300 if self._rng.random() < self._error_ratio else t for t in truth]

    def forget(self, request_id):
        pass


@given(seed=st.integers(0, 1000), error_ratio=st.sampled_from([0.0, 0.2, 0.6, 1.0]))
@settings(max_examples=6)
def test_right_and_wrong_drafts_leave_the_same_tokens_and_the_same_kv(target, expected, seed, error_ratio):
    requests = requests_of(target)
    answers = {r.request_id: r.token_ids + tokens for r, tokens in zip(requests, expected, strict=True)}
    assert decode(target, requests, Oracle(answers, seed, error_ratio)) == expected


def test_ngram_drafts_change_no_token(target, expected):
    requests = requests_of(target)
    assert decode(target, requests, NgramProposer()) == expected
    assert sum(len(guess) for r in requests for guess in r.drafts) > 20


def test_a_draft_model_changes_no_token_and_saves_steps(target, draft, expected):
    proposer, requests = DraftModelProposer(draft, target, num_blocks=256), requests_of(target)
    assert decode(target, requests, proposer) == expected
    assert sum(len(r.drafts) for r in requests) < 0.8 * NUM_TOKENS * len(requests)


def test_a_draft_model_like_the_target_is_always_right_because_it_draws_with_the_same_noise(target, expected):
    requests = requests_of(target)
    assert (
        decode(target, requests, DraftModelProposer(target, target, num_blocks=256), max_draft=3) == expected
    )
    assert all(len(r.drafts) == NUM_TOKENS // 4 for r in requests)


@pytest.mark.parametrize("family", ["gpt_oss_sinks_window", "deepseek_v3_mla"])
def test_windows_sinks_and_latent_heads_verify_as_they_decode(family):
    model = LanguageModel.from_model(TEXT_FAMILIES[family]().model, block_size=BLOCK_SIZE)
    expected = decode(model, requests_of(model), num_tokens=24)
    requests = requests_of(model)
    answers = {r.request_id: r.token_ids + tokens for r, tokens in zip(requests, expected, strict=True)}
    assert decode(model, requests, Oracle(answers, 1, 0.3), num_tokens=24) == expected


@pytest.mark.parametrize("kind", ["draft model", "fixed guess", "n-gram"])
def test_the_first_two_tokens_follow_the_exact_distribution(kind, monkeypatch):
    monkeypatch.setattr(speculation, "MAX_CHUNK_TOKENS", 20_000)
    vocab_size, num_samples, temperature = 6, 1000, 0.7
    model, prompt = tiny_model(vocab_size, seed=1, initializer_range=0.6), [3, 1, 4, 1, 2, 3, 1]
    proposer = {
        "draft model": lambda: DraftModelProposer(
            tiny_model(vocab_size, seed=2), model, num_blocks=3 * num_samples
        ),
        "fixed guess": lambda: Oracle({str(i): [*prompt, i % 6, i % 5] for i in range(num_samples)}, 0, 0.0),
        "n-gram": lambda: NgramProposer(),
    }[kind]()
    requests = [
        Request(str(i), list(prompt), SamplingParams(temperature, seed=i)) for i in range(num_samples)
    ]
    pairs = decode(model, requests, proposer, num_tokens=2)
    assert any(len(guess) for r in requests for guess in r.drafts)
    counts = torch.zeros(vocab_size, vocab_size)
    for first, second in pairs:
        counts[first, second] += 1
    wanted = exact_pairs(model, prompt, vocab_size, temperature) * num_samples
    rare = wanted < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    due = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    assert len(due) > 10 and float(((seen - due) ** 2 / due).sum()) < chi_square_999(len(due) - 1)


def exact_pairs(model: LanguageModel, prompt: list[int], vocab_size: int, temperature: float) -> torch.Tensor:
    """[V, V] probability of every pair of first tokens."""
    kv, table = BlockMemory(model.kv_layout, 4), list(range(4))
    prompts = [prompt, *([*prompt, token] for token in range(vocab_size))]
    logits = torch.cat([model.forward([chunk_of(tokens, 0, table)], kv) for tokens in prompts])
    probs = (logits / temperature).softmax(-1)
    return probs[0][:, None] * probs[1:]


def chi_square_999(degrees: int) -> float:
    """99.9 % quantile (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * spread**0.5) ** 3


def test_accept_stops_behind_the_first_wrong_draft():
    assert accept([], [7]) == [7]
    assert accept([5, 6], [5, 6, 7]) == [5, 6, 7]
    assert accept([5, 6], [5, 8, 7]) == [5, 8]
    assert accept([5, 6], [4, 6, 7]) == [4]


class Fives:
    """Proposes as many tokens as it may, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.forgotten: list[str] = []

    def propose(self, sequences, max_tokens):
        self.asked.append(list(max_tokens))
        return [[5] * most for most in max_tokens]

    def forget(self, request_id):
        self.forgotten.append(request_id)


def drafted(speculator: Speculator, num_right: int) -> int:
    """One step of one request, whose draft is right for `num_right` tokens. Returns the draft's length."""
    ((*draft,),) = speculator.propose([Request("r", [1])], [100])
    speculator.observe("r", len(draft), min(num_right, len(draft)))
    return len(draft)


def test_useless_drafts_shrink_rest_and_are_tried_again():
    speculator = Speculator(Fives(), max_draft_tokens=8)
    assert [drafted(speculator, 0) for _ in range(4)] == [8, 4, 2, 1]
    assert [drafted(speculator, 0) for _ in range(2 * REST_STEPS)] == [*[0] * (REST_STEPS - 1), 1] * 2


def test_right_drafts_grow_and_partly_right_ones_stay():
    speculator = Speculator(Fives(), max_draft_tokens=4)
    assert [drafted(speculator, right) for right in (0, 0, 9, 9, 1, 9, 9)] == [4, 2, 1, 2, 3, 3, 4]


def test_no_draft_is_longer_than_its_room_and_none_is_asked_for_where_there_is_none():
    proposer = Fives()
    speculator = Speculator(proposer, max_draft_tokens=4)
    requests = [Request(name, [1]) for name in "abc"]
    assert [len(guess) for guess in speculator.propose(requests, [0, 2, 9])] == [0, 2, 4]
    assert proposer.asked == [[2, 4]]


def test_forgetting_reaches_the_proposer_and_late_news_is_ignored():
    proposer = Fives()
    speculator = Speculator(proposer, max_draft_tokens=4)
    speculator.propose([Request("r", [1])], [9])
    speculator.forget("r")
    speculator.observe("r", 4, 0)
    assert proposer.forgotten == ["r"]
    assert [len(guess) for guess in speculator.propose([Request("r", [1])], [9])] == [4]


def test_a_proposer_that_raises_keeps_nothing_of_the_choices_that_it_was_asked_for():
    """What it keeps may be half written. The engine asks for each of them again."""

    class Broken:
        def __init__(self):
            self.forgotten = []

        def propose(self, sequences, max_tokens):
            raise IndexError

        def forget(self, request_id):
            self.forgotten.append(request_id)

    broken = Broken()
    unused: Any = None
    speculator = Speculator(broken, 4)
    model: Any = SimpleNamespace(state_blocks=0)
    runner = LanguageRunner(model, unused, unused, unused, speculator=speculator)
    asked = [
        GenerateRequest(name, Prompt((1, 2)), (SamplingParams(),) * 2, StopParams(9)) for name in ("a", "b")
    ]
    with pytest.raises(IndexError):
        runner.propose(
            [
                LanguageRequest(each, 1, 1.0, 0.0, Stopwatch(0.0), computes=False, sends=False)
                for each in asked
            ]
        )
    assert broken.forgotten == ["a/0", "a/1", "b/0", "b/1"]


@pytest.mark.parametrize(
    ("num_answers", "max_drafts", "room"), [(0, None, 512), (300, None, 212), (385, None, None), (64, 3, 256)]
)
def test_prompts_get_what_answers_and_drafts_leave_of_a_recorded_step(num_answers, max_drafts, room) -> None:
    unused: Any = None
    speculator = None if max_drafts is None else Speculator(unused, max_drafts)
    steps: Any = SimpleNamespace(recorded_tokens=512)
    runner = LanguageRunner(unused, steps, unused, unused, speculator=speculator)
    choice = SimpleNamespace(sequences=[TokenSequence("r", Prompt((1, 2)))])
    answer: Any = SimpleNamespace(live_choices=[choice])
    assert runner.room_for_prompts([answer] * num_answers) == room
    steps.recorded_tokens = 0
    assert runner.room_for_prompts([answer]) is None
