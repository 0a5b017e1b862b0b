"""Answers drawn from masks alone are valid, end where the grammar is complete, and never use padded ids."""

from __future__ import annotations

import re

import pytest

from bench.schemas import schemas
from cluster.errors import StructureError, from_info, to_info
from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary
from tests.fakes.structures import (
    END,
    NUM_IDS,
    allowed,
    check_valid,
    demo_source,
    demo_vocabulary,
    ids_of,
    matcher_of,
    of_choices,
    of_grammar,
    of_regex,
    of_schema,
    random_answer,
    text_of,
)

NUM_SCHEMAS = 120
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_every_complete_answer_to_a_schema_is_valid():
    num_complete = 0
    for i, (_, schema) in enumerate(schemas(NUM_SCHEMAS)):
        answer = random_answer(matcher_of(of_schema(schema)), seed=i)
        if answer is not None:
            check_valid(schema, answer)
            num_complete += 1
    assert num_complete >= 0.9 * NUM_SCHEMAS


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-z]+", "(yes|no), (sir|madam)", "a*b?"])
def test_answers_match_a_pattern_as_a_whole(pattern: str):
    answer = random_answer(matcher_of(of_regex(pattern)), seed=1)
    assert answer is not None and re.fullmatch(pattern, answer)


def test_an_answer_is_one_of_the_choices():
    choices = ["yes", "yes, indeed", 'a "quoted" one', "two\nlines", "ünï"]
    found = {random_answer(matcher_of(of_choices(*choices)), seed) for seed in range(30)}
    assert found <= {*choices} and len(found) > 2


@pytest.mark.parametrize(
    "text",
    ['start: "a" pair\npair: "(" pair ")" | /[0-9]+/', 'root ::= "a" pair\npair ::= "(" pair ")" | [0-9]+'],
    ids=["lark", "gbnf"],
)
def test_a_grammar_may_be_written_in_two_ways(text: str):
    answer = random_answer(matcher_of(of_grammar(text)), seed=3)
    assert answer is not None and re.fullmatch(r"a\(*[0-9]+\)*", answer)


def test_padded_ids_and_special_tokens_are_never_allowed():
    matcher = matcher_of(of_regex("(?s:.*)"))
    last = max(token_id for token_id in allowed(matcher) if token_id != END)
    assert last < 1014 and NUM_IDS == 1024  # special tokens from 1014 on, no token from 1023 on


def test_an_answer_may_end_only_where_it_is_complete():
    matcher = matcher_of(of_regex("[0-9]{2,4}"))
    seen = []
    for token_id in ids_of("1234"):
        seen.append(END in allowed(matcher))
        matcher.accept(token_id)
    assert seen == [False, False, True, True] and matcher.is_complete


def test_an_answer_that_cannot_go_on_is_complete_without_an_end_token():
    matcher = matcher_of(of_schema(PERSON))
    for token_id in ids_of('{"name": "x", "age": 7}'):
        assert not matcher.is_complete
        matcher.accept(token_id)
    assert matcher.is_complete


def test_end_tokens_are_those_of_the_request():
    pad = 1015
    both, none = matcher_of(of_regex("a*"), (END, pad)), matcher_of(of_regex("a*"), ())
    assert {END, pad} <= set(allowed(both)) and not {END, pad} & set(allowed(none))
    both.accept(pad)
    assert both.is_complete


def test_the_stop_tokens_that_end_an_answer_are_special_ones():
    assert demo_vocabulary().ends((END, 1015, ids_of(",")[0])) == (END, 1015)


def test_drafts_are_cut_where_the_grammar_forbids_them():
    matcher = matcher_of(of_schema(PERSON))
    drafts = ids_of('{"name": "x", "other"')
    legal = matcher.legal(drafts)
    assert text_of(legal).startswith('{"name": "x", "') and len(legal) < len(drafts)
    assert matcher.legal(legal) == legal and not matcher.legal(ids_of("no"))


def test_text_that_is_certain_is_a_draft_whatever_was_guessed():
    matcher = matcher_of(of_schema(PERSON, is_compact=True))
    forced = matcher.drafts(ids_of("no"), 100)
    assert '{"name":"'.startswith(text_of(forced)) and len(forced) > 1
    assert matcher.drafts((), 1) == forced[:1] and matcher.drafts((), 0) == []
    for token_id in forced:
        assert allowed(matcher) == [token_id]
        matcher.accept(token_id)


def test_a_copy_goes_its_own_way():
    matcher = matcher_of(of_choices("ab", "cd"))
    copied = matcher.copy()
    matcher.accept(ids_of("a")[0])
    assert allowed(copied) != allowed(matcher) and not copied.is_complete


def test_a_token_that_is_not_allowed_fails_by_name():
    matcher = matcher_of(of_choices("ab"))
    with pytest.raises(StructureError) as raised:
        matcher.accept(ids_of("x")[0])
    told = from_info(to_info(raised.value))  # by a worker, to its door
    assert (told.param, told.code) == ("guided_choice", "invalid_structure")


def test_a_dead_end_is_an_error_and_no_end():
    """No token of this vocabulary can write the character."""
    with pytest.raises(StructureError):
        matcher = matcher_of(of_regex("a(?-u:\\xff)"))
        matcher.accept(ids_of("a")[0])
        allowed(matcher)


def test_a_model_without_an_end_token_ends_where_nothing_may_follow():
    source = demo_source()
    vocabulary = Vocabulary(type(source)(source.tokenizer, NUM_IDS, ()))
    matcher = Matcher(compile_structure(of_regex("ab?"), vocabulary), vocabulary)
    matcher.accept(ids_of("a")[0])
    assert allowed(matcher) == ids_of("b")
    matcher.accept(ids_of("b")[0])
    assert matcher.is_complete
