"""A drawn token is a function of its request and position: at every worker, with any drafts, behind a
preemption. The model is a table: a token's logits depend on the token before it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from cluster.engine.draw_state import DrawState
from cluster.engine.drawing import Drawer
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import accept
from cluster.engine.state import LanguageRequest
from cluster.engine.timing import Stopwatch
from cluster.errors import RequestError
from cluster.model.sampling import sample
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import GenerateRequest, LogitChanges, Prompt, SamplingParams, StopParams
from tests.fakes.counting import CountedToken

VOCAB, NUM_TOKENS = 40, 24
PROMPT = (3, 7, 7, 21, 5)
STOP = 11
CHANGES = LogitChanges(
    bias=((4, 1.5), (STOP, 2.0), (30, -100.0)),
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
    bad_words=((9,), (4, 17), (STOP, 2, 4)),
)
torch.manual_seed(5)
TABLE = torch.randn(VOCAB, VOCAB) * 2
WAYS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.2, top_p=0.9, seed=4)}


def request_of(sampling: SamplingParams, **fields: object) -> GenerateRequest:
    stop = StopParams(NUM_TOKENS, (STOP,), 10)
    request = GenerateRequest("r", Prompt(PROMPT), (sampling,), stop, changes=CHANGES)
    return msgspec.structs.replace(request, **fields)


def held(request: GenerateRequest, *, sends: bool) -> LanguageRequest:
    held = LanguageRequest(request, 1, 1.0, 0.0, Stopwatch(0.0), computes=sends, sends=sends)
    last = TABLE[[request.prompt.token_ids[-1]]]
    held.add_prompt(TokenSequence("r/0", request.prompt, last_logits=last))
    return held


def drawn(
    request: GenerateRequest, drafts: Sequence[int] = (), masks: Digits | None = None
) -> tuple[list[int], list[TokenLogprobs]]:
    """The answer, whose first token another worker draws; with up to two of the next tokens of `drafts`, one
    of them wrong, guessed in each step."""
    here, there = Drawer(masks), Drawer(masks)
    first = here.first_tokens([held(request, sends=True)])
    answering = held(request, sends=False)
    (choice,) = answering.choices
    told, is_over = list(first.logprobs_of(0, 1)), choice.append(first.tokens[0])
    while is_over is None:
        done = choice.num_generated
        assert masks is None or masks.num_started < 4 * NUM_TOKENS
        choice.propose([*drafts[done : done + 1], 1] if drafts else [])
        there.begin([(answering, choice)])
        logits = TABLE[[choice.token_ids[-1], *choice.drafts]]
        step = there.next_tokens(logits, [(answering, choice)])
        new = [] if 0 in step.late else accept(choice.drafts, step.tokens)
        told += step.logprobs_of(0, len(new))
        for token_id in new:
            is_over = choice.append(token_id)
            if is_over is not None:
                break
    return choice.token_ids[len(request.prompt.token_ids) :], told[: choice.num_generated]


def expected(sampling: SamplingParams) -> list[int]:
    """By transformers' processors; OpenAI's penalties by their formula."""
    bias = [[[token_id], added] for token_id, added in CHANGES.bias]
    before = LogitsProcessorList(
        [SequenceBiasLogitsProcessor(bias), RepetitionPenaltyLogitsProcessor(CHANGES.repetition_penalty)]
    )
    behind = LogitsProcessorList(
        [
            NoBadWordsLogitsProcessor([list(word) for word in CHANGES.bad_words]),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 10, [STOP]),
        ]
    )
    answer: list[int] = []
    while len(answer) < NUM_TOKENS and (not answer or answer[-1] != STOP):
        ids = torch.tensor([[*PROMPT, *answer]])
        scores = before(ids, TABLE[[int(ids[0, -1])]])
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=VOCAB)
        scores = scores - counts * CHANGES.frequency_penalty - (counts > 0) * CHANGES.presence_penalty
        answer += sample(behind(ids, scores), [sampling], [len(PROMPT) + len(answer)])
    return answer


@pytest.mark.parametrize("sampling", WAYS.values(), ids=WAYS)
def test_changed_logits_are_those_of_transformers_at_every_position(sampling):
    wanted, request = expected(sampling), request_of(sampling)
    assert drawn(request)[0] == wanted and len(set(wanted)) > 5
    assert drawn(request, wanted)[0] == wanted  # with drafts
    for num_done in (1, 4, 9):  # what is left of it at another worker
        rest = request.resumed("again", (0,), tuple(wanted[:num_done]))
        assert drawn(rest)[0] == wanted[num_done:] == drawn(rest, wanted[num_done:])[0]
    plain = drawn(msgspec.structs.replace(request, changes=None))[0]
    assert plain != wanted


def test_rows_do_not_change_each_other():
    asked = [
        request_of(WAYS["sampled"]),
        request_of(WAYS["greedy"], changes=LogitChanges(presence_penalty=2.0)),
        request_of(WAYS["greedy"], changes=None, stop=StopParams(NUM_TOKENS)),
        request_of(WAYS["greedy"], changes=LogitChanges(allowed_token_ids=(6, 39, 12)), num_logprobs=2),
    ]
    requests = [held(request, sends=True) for request in asked]
    together = Drawer().first_tokens(requests).tokens
    assert together == [Drawer().first_tokens([request]).tokens[0] for request in requests]
    answering = [held(request, sends=False) for request in asked]
    pairs = [(request, request.choices[0]) for request in answering]
    for (_, choice), token_id in zip(pairs, together, strict=True):
        choice.append(token_id)
    rows = TABLE[[choice.token_ids[-1] for _, choice in pairs]]
    alone = [Drawer().next_tokens(rows[[i]].clone(), [pair]).tokens[0] for i, pair in enumerate(pairs)]
    assert Drawer().next_tokens(rows, pairs).tokens == alone and alone[3] in (6, 39, 12)


@pytest.mark.parametrize("bad_words", [((6,), (39,)), ((6, 6), (6, 39), (39, 6), (39, 39))])
def test_an_answer_to_which_no_token_is_left_is_refused(bad_words):
    """At its first token, and at its second."""
    changes = LogitChanges(allowed_token_ids=(6, 39), bad_words=bad_words)
    for sampling in WAYS.values():
        with pytest.raises(RequestError, match="forbid all") as refused:
            drawn(request_of(sampling, changes=changes))
        assert refused.value.param == "allowed_token_ids"


def test_log_probabilities_are_the_models_own():
    sampling = WAYS["sampled"]
    wanted, told = drawn(request_of(sampling, num_logprobs=3), expected(sampling))
    assert wanted == expected(sampling) and len(told) == len(wanted)
    for before, token_id, each in zip([PROMPT[-1], *wanted], wanted, told, strict=False):
        own = TABLE[before].log_softmax(-1)
        assert each.drawn == pytest.approx(float(own[token_id]), abs=1e-6)
        assert list(each.top_ids) == own.argsort(descending=True)[:3].tolist()
        assert each.top == pytest.approx(own[list(each.top_ids)].tolist(), abs=1e-6)
    assert not drawn(request_of(sampling))[1]
    assert [each.top for each in drawn(request_of(sampling, num_logprobs=0))[1]] == [()] * len(wanted)


class Alternating:
    """Allows odd tokens behind even ones, and even ones behind odd ones."""

    def __init__(self, last: int):
        self.last = last

    is_complete = False

    def accept(self, token_id: int) -> None:
        self.last = token_id

    def completes(self, token_id: int) -> bool:
        return False

    def drafts(self, guessed: Sequence[int], limit: int) -> list[int]:
        return list(guessed)


class Digits:
    def __init__(self) -> None:
        self.num_started = 0

    def constraint(self, request: GenerateRequest, generated: Sequence[int]) -> Alternating:
        return Alternating(generated[-1] if generated else 0)

    def start(self, wanted: Sequence[tuple[Alternating, Sequence[int]]]) -> None:
        self.num_started += 1
        self.lasts = [last for state, drafts in wanted for last in (state.last, *drafts)]

    def may_draw(self, constraint: Alternating) -> bool:
        return True

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        words = [[0x55555555 if last % 2 else -0x55555556] * 2 for last in self.lasts]
        return np.array(words, dtype=np.int32), frozenset()


def test_a_constraint_masks_first_tokens_steps_and_drafts():
    request, masks = request_of(WAYS["sampled"]), Digits()
    answer, _ = drawn(request, masks=masks)
    assert [token_id % 2 for token_id in answer] == [1, 0] * (len(answer) // 2) + [1] * (len(answer) % 2)
    assert masks.num_started == len(answer)
    assert drawn(request, answer, masks)[0] == answer
    assert drawn(request.resumed("again", (0,), tuple(answer[:3])), answer[3:], masks)[0] == answer[3:]


class LateDigits(Digits):
    """Two masks of three are late."""

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        masks, _ = super().take()
        is_late = self.num_started > 1 and self.num_started % 3 > 0
        return np.zeros_like(masks) if is_late else masks, frozenset({0} if is_late else ())


@pytest.mark.parametrize("way", WAYS)
def test_a_late_mask_delays_tokens_and_changes_none(way: str):
    request = request_of(WAYS[way])
    answer, _ = drawn(request, masks=Digits())
    late = LateDigits()
    assert drawn(request, masks=late)[0] == answer and late.num_started > 2 * len(answer)
    assert drawn(request, answer, LateDigits())[0] == answer


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    bad_words=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=8
    ),
    answer=st.lists(st.integers(0, 2), max_size=20),
    num_done=st.integers(0, 20),
)
def test_bad_words_forbid_their_last_token_behind_all_others(bad_words, answer, num_done):
    request = request_of(
        SamplingParams(), changes=LogitChanges(bad_words=tuple(bad_words)), stop=StopParams(1)
    )
    state = DrawState(request, answer[:num_done], None)
    for i in range(num_done, len(answer) + 1):
        for drafts in ([], answer[i : i + 3]):
            read = (*answer[:i], *drafts)
            expected = [end for *start, end in bad_words if [*read[len(read) - len(start) :]] == start]
            assert sorted(state.forbidden(0, drafts)) == sorted(expected)
        if i < len(answer):
            state.accept(answer[i])


@pytest.mark.parametrize("length", [60, 250])
@pytest.mark.parametrize("num_choices", [1, 8])
def test_what_bad_words_cost_in_a_step_does_not_depend_on_their_number_and_length(
    length, num_choices, monkeypatch
):
    bad_words = tuple((*[1] * length, i) for i in range(2, 130))
    request = request_of(SamplingParams(), changes=LogitChanges(bad_words=bad_words), stop=StopParams(1))
    states = [DrawState(request, [], None) for _ in range(num_choices)]
    zero, one = CountedToken(0), CountedToken(1)
    tokens = [*[one] * (length + 5), zero, *[one] * (length - 1), zero] * 5
    num_found = 0
    monkeypatch.setattr(CountedToken, "num_lookups", 0)
    for state in states:
        for token_id in tokens:
            num_found += len(state.forbidden(0, [])) + len(state.forbidden(0, [one]))
            state.accept(token_id)
    assert num_found == 128 * 5 * (6 + 8) * num_choices
    assert CountedToken.num_lookups <= 4 * len(tokens) * num_choices
    CountedToken.num_lookups = 0
    states[0].accept(one)
    states[0].forbidden(0, [zero])  # a draft that leaves a word
    assert CountedToken.num_lookups <= length + 2


def test_the_choices_of_a_request_share_the_table_of_its_bad_words(monkeypatch):
    """Each of them only looks it up, by the bad words; the first one builds it."""
    # of a length of their own: the table of equal words may be there already
    words = tuple((*[CountedToken(1)] * 61, CountedToken(i)) for i in range(2, 130))
    request = request_of(SamplingParams(), changes=LogitChanges(bad_words=words))
    costs = []
    for _ in range(8):
        monkeypatch.setattr(CountedToken, "num_lookups", 0)
        DrawState(request, [], None)
        costs.append(CountedToken.num_lookups)
    assert costs[0] > 1.5 * costs[1] and max(costs[1:]) <= sum(map(len, words))
