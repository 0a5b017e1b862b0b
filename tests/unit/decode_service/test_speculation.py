"""With drafts or without, the same tokens; what proposers guess, and what they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.types.request import SamplingParams
from decode_service.speculation import (
    REST_STEPS,
    DraftModelProposer,
    NgramProposer,
    Proposer,
    Speculator,
    accept,
)
from tests.flow.tiny_models import TEXT_FAMILIES

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
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=initializer_range, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LanguageModel.from_model(hf.LlamaForCausalLM(config).float(), block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return LanguageModel.from_model(TEXT_FAMILIES["qwen3"]().model, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def draft() -> LanguageModel:
    """The target, a little changed: right now and then."""
    model = TEXT_FAMILIES["qwen3"]().model
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    return LanguageModel.from_model(model, block_size=BLOCK_SIZE)


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
) -> list[list[int]]:
    """Generates `num_tokens` for every request, as an engine would; without a proposer by `LanguageModel.decode`."""
    width = -(-max(len(r.token_ids) + num_tokens for r in requests) // BLOCK_SIZE)
    kv = BlockMemory(model.kv_layout, width * len(requests))
    for i, request in enumerate(requests):
        request.start, request.end = len(request.token_ids), len(request.token_ids) + num_tokens
        request.table = list(range(i * width, (i + 1) * width))
    model.forward([chunk_of(r.token_ids[:-1], 0, r.table) for r in requests], kv)
    while running := [r for r in requests if len(r.token_ids) < r.end]:
        step(model, kv, running, proposer, max_draft)
        for request in running:
            if proposer is not None and len(request.token_ids) == request.end:
                proposer.forget(request.request_id)
    return [r.token_ids[r.start :] for r in requests]


def step(
    model: LanguageModel, kv: BlockMemory, running: list[Request], proposer: Proposer | None, max_draft: int
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
        chunks = [chunk_of([r.token_ids[-1], *guess], len(r.token_ids) - 1, r.table) for r, guess in batch]
        logits = model.verify(chunks, kv)
    rows = [
        (r, n + i) for r, n, guess in zip(running, lens, drafts, strict=True) for i in range(len(guess) + 1)
    ]
    drawn = iter(sample(logits, [r.sampling for r, _ in rows], [position for _, position in rows]))
    for request, guess in zip(running, drafts, strict=True):
        request.token_ids += accept(guess, [next(drawn) for _ in range(len(guess) + 1)])
        request.drafts.append(guess)


def chunk_of(token_ids: Sequence[int], start: int, table: Sequence[int]) -> SequenceChunk:
    return SequenceChunk(token_ids, torch.arange(start, start + len(token_ids)), start, table)


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    return decode(target, requests_of(target))


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
@settings(max_examples=6, deadline=None)
def test_right_and_wrong_drafts_leave_the_same_tokens_and_the_same_kv(target, expected, seed, error_ratio):
    requests = requests_of(target)
    answers = {r.request_id: r.token_ids + tokens for r, tokens in zip(requests, expected, strict=True)}
    assert decode(target, requests, Oracle(answers, seed, error_ratio)) == expected


def test_ngram_drafts_change_no_token(target, expected):
    requests = requests_of(target)
    assert decode(target, requests, NgramProposer(min_ngram=1)) == expected
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
def test_the_first_two_tokens_follow_the_exact_distribution(kind):
    vocab_size, num_samples, temperature = 6, 1000, 0.7
    model, prompt = tiny_model(vocab_size, seed=1, initializer_range=0.6), [3, 1, 4, 1, 2, 3, 1]
    proposer = {
        "draft model": lambda: DraftModelProposer(
            tiny_model(vocab_size, seed=2), model, num_blocks=3 * num_samples, max_chunk_tokens=20_000
        ),
        "fixed guess": lambda: Oracle({str(i): [*prompt, i % 6, i % 5] for i in range(num_samples)}, 0, 0.0),
        "n-gram": lambda: NgramProposer(min_ngram=1),
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


def naive_draft(token_ids: list[int], sizes: range, max_tokens: int, forbidden: frozenset[int]) -> list[int]:
    for size in sizes:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[len(token_ids) - size :]:
                known = list(token_ids)
                while len(known) < len(token_ids) + max_tokens:
                    known.append(known[end + len(known) - len(token_ids)])
                draft = known[len(token_ids) :]
                return draft[: next((i for i, token in enumerate(draft) if token in forbidden), max_tokens)]
    return []


@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 2),
    max_tokens=st.integers(0, 9),
)
def test_the_ngram_index_finds_what_a_search_of_the_whole_history_finds(parts, min_ngram, more, max_tokens):
    forbidden = frozenset({3})
    proposer = NgramProposer(forbidden, min_ngram=min_ngram, max_ngram=min_ngram + more)
    request = Request("r", [])
    for part in parts:
        request.token_ids += part
        wanted = naive_draft(
            request.token_ids, range(min_ngram + more, min_ngram - 1, -1), max_tokens, forbidden
        )
        assert proposer.propose([request], [max_tokens]) == [wanted]


def test_a_history_beyond_the_limit_is_not_indexed_and_what_comes_after_is():
    proposer = NgramProposer(max_history=8)
    request = Request("r", [1, 2, 3, 4, *range(10, 20), 1, 2])
    assert proposer.propose([request], [4]) == [[]]
    request.token_ids += [5, 1, 2]
    assert proposer.propose([request], [2]) == [[5, 1]]


def test_a_forgotten_request_leaves_no_history():
    proposer = NgramProposer()
    proposer.propose([Request("r", [1, 2, 3, 1, 2])], [1])
    proposer.forget("r")
    assert proposer.propose([Request("r", [9, 1, 2])], [1]) == [[]]


@pytest.mark.parametrize("num_blocks", [1, 12, 30, 60])
def test_a_small_draft_pool_costs_drafts_only_and_leaks_nothing(target, draft, expected, num_blocks):
    proposer, requests = DraftModelProposer(draft, target, num_blocks), requests_of(target)
    assert decode(target, requests, proposer) == expected
    assert (sum(len(guess) for r in requests for guess in r.drafts) > 0) == (num_blocks > 1)
    assert proposer.blocks.num_referenced == 0
    proposer.blocks.check_integrity()


@pytest.mark.parametrize("num_blocks", [30, 256])
def test_kv_that_the_draft_model_kept_gives_the_guesses_of_kv_computed_anew(target, draft, num_blocks):
    kept = DraftModelProposer(draft, target, num_blocks)
    sizes = set()

    class Compared:
        forget = kept.forget

        def propose(self, sequences, max_tokens):
            anew = DraftModelProposer(draft, target, num_blocks=256).propose(sequences, max_tokens)
            guesses = kept.propose(sequences, max_tokens)
            assert all(guess in ([], whole) for guess, whole in zip(guesses, anew, strict=True))
            sizes.update(len(guess) for guess in guesses)
            return guesses

    decode(target, requests_of(target), Compared(), num_tokens=20)
    assert {0, 4} <= sizes


def test_a_long_prompt_catches_up_in_chunks_while_others_get_their_drafts(target):
    proposer = DraftModelProposer(target, target, num_blocks=64, max_chunk_tokens=16)
    short, long = Request("short", [1, 2, 3]), Request("long", list(range(5, 45)))
    lengths = []
    for _ in range(5):
        drafts = proposer.propose([long, short], [2, 2])
        lengths.append([len(guess) for guess in drafts])
        short.token_ids += drafts[1]
    assert lengths == [[0, 2], [0, 2], [2, 2], [2, 2], [2, 2]]


def test_a_draft_that_was_not_used_is_made_again(target):
    proposer = DraftModelProposer(target, target, num_blocks=64)
    request = Request("r", list(range(5, 12)))
    (first,) = proposer.propose([request], [4])
    assert proposer.propose([request], [4]) == [first]
    request.token_ids += first[:2]
    assert proposer.propose([request], [2]) == [first[2:]]
    request.token_ids += [7, 8, 9, 7, 8, 9]
    anew = DraftModelProposer(target, target, num_blocks=64)
    assert proposer.propose([request], [4]) == anew.propose([request], [4])


def test_requests_with_media_and_beyond_the_context_get_no_draft(target):
    proposer = DraftModelProposer(target, target, num_blocks=256, placeholders=[290])
    with_media, too_long = Request("m", [1, 290, 290, 2]), Request("l", [1] * (target.max_model_len - 1))
    assert proposer.propose([with_media, too_long, Request("t", [1, 2])], [3, 3, 0]) == [[], [], []]
    assert proposer.blocks.num_referenced == 0


def test_two_vocabularies_are_refused_by_name(target):
    with pytest.raises(ConfigError, match=r"qwen3-.*300 tokens.*same vocabulary") as refusal:
        DraftModelProposer(tiny_model(12, seed=0), target, num_blocks=4)
    assert "llama-" in refusal.value.message and "12 tokens" in refusal.value.message


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
