"""Calls as grammars: what is drawn under one is read as calls with valid arguments, in every family's
form."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from cluster.errors import StructureError
from cluster.structure.calls import CallForm, CallGrammar, HeldFunction, Reasoning, ReasoningForm
from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from cluster.text.answer_format import AnswerSyntax, Family
from cluster.text.formats import ORDER
from cluster.types.structure import Structure, StructureKind
from router.parsing.parser import AnswerParser
from tests.fakes.structures import END, check_valid, demo_tokenizer, demo_vocabulary, ids_of, text_of

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": CITY, "now": NOTHING}
FUNCTIONS = [HeldFunction(name, json.dumps(schema), "tools") for name, schema in SCHEMAS.items()]
WITH_FORMS = [name for name in ORDER if Family.load(name).calls is not None]


def matcher_of(text: str) -> Matcher:
    vocabulary = demo_vocabulary()
    return Matcher(
        compile_structure(Structure(StructureKind.CALLS, text, "tools"), vocabulary), vocabulary, (END,)
    )


def form_of(name: str) -> AnswerSyntax:
    return AnswerSyntax(Family.load(name), SimpleNamespace(added_tokens_decoder={}))


def drawn(matcher: Matcher, seed: int, limit: int = 120) -> str | None:
    """The text of tokens drawn from the masks, ended where it may end. None: it did not end."""
    dice, token_ids = random.Random(seed), []
    while not matcher.is_complete:
        allowed = matcher.allowed()
        token_ids.append(END if END in allowed else int(dice.choice(allowed)))
        matcher.accept(token_ids[-1])
        if len(token_ids) > limit:
            return None
    return text_of([each for each in token_ids if each != END])


def grammar_of(name: str) -> CallGrammar:
    grammar = form_of(name).grammar
    assert grammar is not None
    return grammar


def fits(matcher: Matcher, text: str) -> bool:
    """Whether an answer may have this text, and end there."""
    found = matcher.copy()
    token_ids = ids_of(text)
    return len(found.legal(token_ids)) == len(token_ids) and _ends(found, token_ids)


def _ends(matcher: Matcher, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        matcher.accept(token_id)
    return matcher.is_complete or END in matcher.allowed()


@pytest.mark.parametrize("name", WITH_FORMS)
def test_what_must_be_a_call_is_read_as_one(name):
    form = form_of(name)
    root = matcher_of(grammar_of(name).required(FUNCTIONS, Reasoning.NONE, is_parallel=True))
    said = [text for seed in range(4) if (text := drawn(root.copy(), seed)) is not None]
    assert said
    for text in said:
        parser = AnswerParser(form, "", has_calls=True)
        parts = [parser.push(text), parser.finish(is_cut=False)]
        calls: dict[int, list[str]] = {}
        for piece in (piece for part in parts for piece in part.calls):
            calls.setdefault(piece.index, [piece.name, ""])[1] += piece.arguments
        assert calls and not any(part.content for part in parts), text
        for called, arguments in calls.values():
            check_valid(SCHEMAS[called], arguments)


def test_calls_come_behind_reasoning_and_as_many_as_are_allowed():
    grammar = grammar_of("hermes")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    one = matcher_of(grammar.required(FUNCTIONS, Reasoning.NONE, is_parallel=False))
    many = matcher_of(grammar.required(FUNCTIONS, Reasoning.MAY_COME, is_parallel=True))
    inside = matcher_of(grammar.required(FUNCTIONS, Reasoning.OPEN, is_parallel=True))
    assert (
        fits(one, call) and not fits(one, f"{call}\n{call}") and not fits(one, f"<think>x</think>\n\n{call}")
    )
    assert fits(many, f"{call}\n{call}") and fits(many, f"<think>x\ny</think>\n\n{call}")
    assert not fits(many, "<think>x</think>\n\nno call") and not fits(many, "no call")
    assert fits(inside, f"x</think>\n\n{call}") and not fits(inside, call)


def test_json_of_a_schema_may_come_in_place_of_calls():
    grammar = grammar_of("hermes")
    schema = Structure(StructureKind.JSON_SCHEMA, json.dumps(CITY), "response_format", is_compact=True)
    either = matcher_of(grammar.required(FUNCTIONS, Reasoning.NONE, is_parallel=True, answer=schema))
    assert fits(either, '{"city":"Rome","days":2}') and not fits(either, '{"city":"Oslo","days":2}')
    assert fits(either, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not fits(either, "words") and not fits(either, '{"city": "Rome","days":2}')


def test_calls_within_text_have_valid_arguments():
    grammar = grammar_of("hermes")
    call = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}", "days": 2}}}}\n</tool_call>'
    free = matcher_of(grammar.triggered(FUNCTIONS, is_parallel=True))
    for text in (
        "only text",
        f"first {call.format('Rome')}",
        f"{call.format('Rome')} and {call.format('Paris')}.",
    ):
        assert fits(free, text)
    assert not fits(free, f"first {call.format('Oslo')}") and not fits(free, "first <tool_call> and words")
    single = matcher_of(grammar.triggered(FUNCTIONS, is_parallel=False))
    assert fits(single, f"first {call.format('Rome')}") and fits(single, "only text")
    assert not fits(single, f"{call.format('Rome')} and {call.format('Paris')}.")


def test_special_tokens_of_a_form_are_tokens_and_not_letters():
    form = CallForm("<|vision_bos|>$name:$arguments", trigger="<|vision_bos|>")
    (special,) = ids_of("<|vision_bos|>")
    grammar = CallGrammar(
        form,
        ReasoningForm("<|audio_bos|>", "<|audio_eos|>"),
        {
            text: token_id
            for text in ("<|vision_bos|>", "<|audio_bos|>", "<|audio_eos|>")
            for token_id in ids_of(text)
        },
    )
    matcher = matcher_of(grammar.required(FUNCTIONS, Reasoning.MAY_COME, is_parallel=False))
    assert set(matcher.allowed()) == {special, *ids_of("<|audio_bos|>")}
    assert fits(matcher, "<|audio_bos|>hm<|audio_eos|><|vision_bos|>now:{}") and fits(
        matcher, "<|vision_bos|>now:{}"
    )
    assert fits(matcher_of(grammar.triggered(FUNCTIONS, is_parallel=False)), "so <|vision_bos|>now:{}")


def test_a_schema_that_cannot_be_held_is_refused_by_its_name():
    bad = HeldFunction("f", '{"type": "object", "minProperties": 5}', "tools[3].function.parameters")
    with pytest.raises(StructureError) as raised:
        grammar_of("hermes").required([bad], Reasoning.NONE, is_parallel=True)
    assert raised.value.param == bad.param


def test_tags_of_a_form_that_are_tokens_of_the_model_are_those_tokens():
    """Qwen's tags are added tokens that are not marked as special."""
    tokenizer = Tokenizer.from_str(demo_tokenizer().to_str())
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    vocabulary = Vocabulary(VocabularySource(tokenizer.to_str(), 1040, (END,)))
    form = AnswerSyntax(Family.load("hermes"), SimpleNamespace(**_added(tokenizer)))
    assert form.grammar is not None
    for text in (
        form.grammar.required(FUNCTIONS, Reasoning.NONE, is_parallel=False),
        form.grammar.triggered(FUNCTIONS, is_parallel=False),
    ):
        native = compile_structure(Structure(StructureKind.CALLS, text, "tools"), vocabulary)
        matcher = Matcher(native, vocabulary, (END,))
        token_ids = tokenizer.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>').ids
        assert token_ids[0] == 1024 and matcher.legal(token_ids) == token_ids
        assert _ends(matcher, token_ids)


def _added(tokenizer: Tokenizer) -> dict[str, object]:
    return {"added_tokens_decoder": tokenizer.get_added_tokens_decoder()}
