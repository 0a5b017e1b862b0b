"""Answers of each family to content, reasoning and calls, split at every position."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.text.answer_format import AnswerSyntax, Family
from cluster.text.formats import ORDER
from cluster.types.messages import FinishReason, TokenEvent
from router.calls import TextDelta
from router.parsing.parser import MAX_WAITING, AnswerParser, ParsedAnswer

PLAIN = SimpleNamespace(added_tokens_decoder={})  # no special tokens
ARGUMENTS = {"city": 'Rö"m}\n</', "list": [12, 1.5, True, None, -3], "inner": {"a": "<é>"}, "last": 20}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOLS = [{"type": "function", "function": {"name": "f.g-1", "parameters": SCHEMA}}]
LONG_NAME = "f" * 257  # no request would take it back
THOUGHT = "I think\n\nso"
# What a grammar cannot say: arguments as text
XML = {
    "qwen_xml": "<tool_call>\n<function=f.g-1>\n<parameter=city>\nRome\nand\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n"
    '<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>',
    "glm": "<tool_call>f.g-1\n<arg_key>city</arg_key>\n<arg_value>Rome\nand</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    '<arg_key>tags</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
}
CAST = {"city": "Rome\nand", "days": 2, "tags": ["a"]}


def form_of(name: str) -> AnswerSyntax:
    return AnswerSyntax(Family.load(name), PLAIN)


def parser_of(name: str, prefix: str = "", **more: Any) -> AnswerParser:
    return AnswerParser(form_of(name), prefix, **{"has_calls": True, "streams": True, "tools": TOOLS, **more})


def read(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, names and arguments."""
    parts = [*(parser.push(piece) for piece in pieces), parser.finish(is_cut=True)]
    ids: list[str] = []
    calls: list[list[str]] = []
    for piece in (piece for part in parts for piece in part.calls):
        if piece.name:
            assert piece.index == len(calls) and piece.call_id
            ids.append(piece.call_id)
            calls.append([piece.name, piece.arguments])
        else:
            calls[piece.index][1] += piece.arguments
    assert len(set(ids)) == len(ids)
    content = "".join(part.content for part in parts)
    return content, "".join(part.reasoning for part in parts), [(name, text) for name, text in calls]


def answer_of(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Reasoning and calls, as the family writes them; what the calls say."""
    family = Family.load(name)
    thought = ""
    if family.reasoning is not None:
        thought = f"{family.reasoning.begin}\n{THOUGHT}\n{family.reasoning.end}{family.reasoning.gap}"
    if name in XML:
        return f"{thought}{XML[name]}\n{XML[name]}", [CAST, CAST]
    form = family.calls
    if form is None:
        return thought, []
    call = form.call.replace("$name", "f.g-1").replace("$arguments", json.dumps(ARGUMENTS))
    more = "" if form.between is None else form.between + call
    return f"{thought}{form.begin}{call}{more}{form.end}", [ARGUMENTS] * (2 if more else 1)


@pytest.mark.parametrize("name", ORDER)
def test_an_answer_is_the_same_wherever_it_is_split(name):
    text, said = answer_of(name)
    reasoning = THOUGHT if Family.load(name).reasoning else ""
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        content, thought, calls = read(parser_of(name), pieces)
        assert (content, thought) == ("", reasoning), pieces
        assert [name for name, _ in calls] == ["f.g-1"] * len(said), pieces
        assert [json.loads(arguments) for _, arguments in calls] == said, pieces


@pytest.mark.parametrize("name", [name for name in ORDER if Family.load(name).calls])
def test_arguments_stream_before_the_call_is_complete(name):
    text, _ = answer_of(name)
    parser, last = parser_of(name), 0
    num_pieces = 0
    for i, letter in enumerate(text):
        calls = parser.push(letter).calls
        num_pieces += len(calls)
        last = i if calls else last
        if num_pieces == 3:
            break
    assert last < text.index("last")


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "deepseek", "mistral_args"])
def test_text_before_and_behind_calls_is_content(name):
    family = Family.load(name)
    reasoning = family.reasoning
    assert reasoning is not None
    calls = XML.get(name) or answer_of(name)[0].partition(reasoning.end + reasoning.gap)[2]
    behind = "" if name == "mistral_args" else "\nDone."
    content, _, found = read(parser_of(name), list(f" Well <b> [x].\n\n{calls}{behind}"))
    assert content == f"Well <b> [x].{behind}" and len(found) == (1 if name in XML else 2)


@pytest.mark.parametrize("name", ORDER)
def test_an_ordinary_answer_is_content(name):
    text = 'It is 5 < 7, <tool, {"name" and [TOOL} are words.\n\nSo?'
    if name == "harmony":
        text = f"<|channel|>final<|message|>{text}"
    for pieces in ([text], list(text)):
        content, reasoning, calls = read(parser_of(name), pieces)
        assert content == text.removeprefix("<|channel|>final<|message|>") and not reasoning and not calls


def test_nothing_of_a_long_answer_is_lost():
    """Also where a template of a checkpoint looks for more than ever waits."""
    template = Family.load("hermes").template
    fields = {
        **template["fields"],
        "reasoning_content": {"open_pattern": "<think[^>]*>", "close": "</think>"},
    }
    greedy = AnswerSyntax(Family((), {**template, "fields": fields}), PLAIN)
    words = " ".join(map(str, range(2 * MAX_WAITING)))
    call, arguments = f'<tool_call>{{"name": "f", "arguments": {{"a": "{words}"}}}}</tool_call>', {"a": words}
    for form, text in ((form_of("hermes"), words), (greedy, words), (greedy, f"<think {words}")):
        for size in (7, 300, 100_000):
            parser = AnswerParser(form, "", has_calls=True, streams=True)
            whole = text + call
            content, _, calls = read(parser, [whole[i : i + size] for i in range(0, len(whole), size)])
            assert content == text, size
            assert [(name, json.loads(said)) for name, said in calls] == [("f", arguments)], size


def test_the_prompt_may_have_begun_or_ended_the_reasoning():
    head = "<|im_start|>user\n<think>\n<|im_start|>assistant\n"
    assert read(parser_of("hermes", head + "<think>\n"), ["so\n</think>\n\nok"])[:2] == ("ok", "so")
    assert read(parser_of("hermes", head + "<think>\n\n</think>\n\n"), ["ok"])[:2] == ("ok", "")
    assert read(parser_of("hermes", head), ["<think>so</think>ok"])[:2] == ("ok", "so")
    assert read(parser_of("hermes", "no head, but a <think>"), ["ok"])[:2] == ("ok", "")


@pytest.mark.parametrize(
    ("written", "content", "arguments"),
    [
        ("<tool_call>\nnot json\n</tool_call>\nso", "not json\nso", []),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', '{"arguments": {}}', []),
        (f'<tool_call>{{"name": "{LONG_NAME}"}}</tool_call>', f'{{"name": "{LONG_NAME}"}}', []),
        ('<tool_call>\n{"name": "f", "arguments": "[1]"}\n</tool_call>', "", ["[1]"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "", ["{}"]),
        ('<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", ['{"a": 1}']),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "bc', "", ['{"a": "bc']),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 12', "", ['{"a": ']),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "", ['{"a": "\\ud83d"}']),
    ],
)
def test_broken_calls_lose_nothing(written, content, arguments):
    for pieces in ([written], list(written)):
        found, _, calls = read(parser_of("hermes"), pieces)
        assert (found, [text for _, text in calls]) == (content, arguments)
        json.dumps(calls).encode()


UNCLOSED = '{"name": "f", "arguments": {"a": "bc"}'


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_complete_call_that_cannot_be_parsed_is_content(size, end):
    for behind in ("", "\nDone."):
        written = f"<tool_call>\n{UNCLOSED}\n</tool_call>{behind}"
        deltas = said(written, size, end, streams=False)
        assert "".join(delta.text for delta in deltas) == UNCLOSED + behind
        assert not any(delta.calls for delta in deltas)
        assert deltas[-1].finish_reason == ("stop" if end is FinishReason.STOP else "length")
        streamed = said(written, size, end)
        if size < 1000:  # what has gone out of the call stays, and what follows the call is not lost
            assert "".join(call.arguments for delta in streamed for call in delta.calls) == '{"a": "bc'
            assert "".join(delta.text for delta in streamed) == behind.lstrip()


def test_a_call_that_the_model_does_not_end_is_content_unless_the_answer_was_cut():
    for name, written in (
        ("hermes", f"<tool_call>{UNCLOSED}"),
        ("llama3", '{"name": "f", "parameters": {"a": "b'),
    ):
        answers = [parser_of(name, streams=False) for _ in range(2)]
        for answer in answers:
            answer.push(written)
        ended, cut = answers[0].finish(is_cut=False), answers[1].finish(is_cut=True)
        assert ended.content == written.removeprefix("<tool_call>") and not ended.calls
        assert [call.name for call in cut.calls] == ["f"] and not cut.content


def test_without_tools_what_looks_like_a_call_is_content():
    text, _ = answer_of("hermes")
    content, reasoning, calls = read(parser_of("hermes", has_calls=False), list(text))
    assert content.startswith("<tool_call>") and reasoning == THOUGHT and not calls


class Said:
    """An `AnswerText` that says its events' tokens as letters."""

    def push(self, event: TokenEvent) -> TextDelta:
        reasons: dict[Any, Any] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
        reason = reasons.get(event.finish_reason)
        return TextDelta("".join(map(chr, event.token_ids)), len(event.token_ids), reason)


def said(text: str, size: int, end: FinishReason = FinishReason.STOP, **more: Any) -> list[TextDelta]:
    letters: Any = Said()
    answer = ParsedAnswer(letters, parser_of("hermes", **more), shows_reasoning=False)
    deltas = []
    for start in range(0, len(text), size):
        is_last = start + size >= len(text)
        tokens = tuple(map(ord, text[start : start + size]))
        deltas.append(answer.push(TokenEvent("r", tokens, end if is_last else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_with_calls_ends_with_their_reason(size):
    text, _ = answer_of("hermes")
    deltas = said(text, size)
    assert deltas[-1].finish_reason == "tool_calls" and not any(delta.reasoning for delta in deltas)
    assert {call.index for delta in deltas for call in delta.calls} == {0, 1}
    if size == 1:
        num_tokens = sum(delta.num_reasoning_tokens for delta in deltas)
        assert len(THOUGHT) < num_tokens <= len(f"<think>\n{THOUGHT}\n</think>")
    deltas = said(text, size, is_parallel=False)
    assert deltas[-1].finish_reason == "tool_calls"
    assert {call.index for delta in deltas for call in delta.calls} == {0}
    assert said("no call", size)[-1].finish_reason == "stop"


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_that_is_cut_within_its_first_call_ends_with_its_length(size, is_parallel):
    cut = '<tool_call>{"name": "f", "arguments": {"a": tru'
    for streams in (False, True):
        deltas = said(cut, size, FinishReason.LENGTH, is_parallel=is_parallel, streams=streams)
        assert deltas[-1].finish_reason == "length"
        whole = said(cut + "e}}</tool_call>", size, is_parallel=is_parallel, streams=streams)
        assert whole[-1].finish_reason == "tool_calls"


def test_a_call_ends_where_the_model_changes_an_argument_that_has_been_sent():
    text = '<tool_call>{"name": "f", "arguments": {"a": "x", "b": 1, "a": "y"}}</tool_call>'
    assert read(parser_of("hermes", streams=False), list(text))[2] == [("f", '{"a": "y", "b": 1}')]
    content, _, ((name, arguments), second) = read(parser_of("hermes"), list(f"{text}\n{text}\nDone."))
    assert name == "f" and arguments == '{"a": "x", "b": ' and second == (name, arguments)
    assert content == "Done."
