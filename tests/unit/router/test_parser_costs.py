"""What the parser of answers costs, counted in steps of its patterns and in characters that it parses: in
proportion to the answer, for every form, whatever the answer consists of and however it is split."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_parsing import content_parsers

from cluster.text.answer_format import AnswerSyntax, Family
from cluster.text.formats import ORDER
from router.parsing import calls
from router.parsing.parser import MAX_WAITING, AnswerParser
from tests.fakes.counting import CountedPattern
from tests.fakes.slow_params import often

PLAIN = SimpleNamespace(added_tokens_decoder={})
SPACES = (" ", "\n", " \n\t")
LETTERS = ("a", '"', "{", "}", "[", "\\", '\\"', "7", "<", "<|", "<｜")
BEHIND = {"qwen_xml": ["</function></tool_call>"], "glm": ["</tool_call>"], "hermes": ["</tool_call>"]}
CALL = "<tool_call>"
DEEPSEEK = "<｜tool▁call▁begin｜>"
COMMENTARY = "<|channel|>commentary"
WITHIN = {  # what comes before the many
    "hermes": [CALL, CALL + '{"name": "f", "arguments": {"a": "', "<think>"],
    "qwen_xml": [
        *(CALL + more for more in ("", "<function=", "<function=f>", "<function=f></function>")),
        CALL + "<function=f><parameter=a>", "<think>",
    ],
    "glm": [
        *(CALL + more for more in ("", "f<arg_key>", "f<arg_key>a</arg_key>")),
        CALL + "f<arg_key>a</arg_key><arg_value>", "<think>",
    ],
    "deepseek": ["<｜tool▁calls▁begin｜>", DEEPSEEK, DEEPSEEK + "f<｜tool▁sep｜>{", "<think>"],
    "deepseek_fenced": [
        "<｜tool▁calls▁begin｜>", DEEPSEEK + "function<｜tool▁sep｜>f\n```json\n", "<think>",
    ],
    "harmony": [
        *(COMMENTARY + more for more in ("", " to=functions.f", " to=functions.f <|message|>")),
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    ],
    "llama3": ["{", '{"name":', '{"type"', "<|python_tag|>", '{"name": "f", "parameters": {"a": '],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"a": ', "[THINK]"],
    "mistral_args": ["[TOOL_CALLS]", "[TOOL_CALLS]f", '[TOOL_CALLS]f[ARGS]{"a": "', "[THINK]"],
    "thinking": ["<think>"],
}  # fmt: skip
AGAIN = {  # what may come again and again without what it needs
    "hermes": ["</tool_call>"],
    "qwen_xml": ["</function>", "</parameter>", "<parameter=", "<parameter=a>"],
    "glm": ["<arg_key>", "</arg_key>", "<arg_key>a</arg_key><arg_value>"],
}


def beginnings(name: str) -> list[str]:
    """What the form looks for, whole and without its end."""
    tags = [tag for text in WITHIN[name] for tag in (text, text[: len(text) // 2 + 1])]
    family = Family.load(name)
    return [*tags, *([family.reasoning.end] if family.reasoning else []), *AGAIN.get(name, [])]


class Costs:
    """Of answers that are parsed while the patterns and the parsers of arguments are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        self.form = AnswerSyntax(Family.load(name), PLAIN)
        self.num_parsed = 0
        self.num_waiting = 0
        self.patterns: list[CountedPattern] = []
        for field in self.form.with_calls.fields.values():
            for key in ("open_re", "close_re"):
                if (pattern := getattr(field, key)) is not None:
                    self.patterns.append(CountedPattern(pattern))
                    setattr(field, key, self.patterns[-1])
        self._watch(monkeypatch)

    def of(self, text: str, size: int) -> int:
        self.num_parsed = self.num_waiting = 0
        for pattern in self.patterns:
            pattern.num_steps = 0
        parser = AnswerParser(self.form, "", has_calls=True, streams=True)
        for start in range(0, len(text), size):
            parser.push(text[start : start + size])
        parser.finish(is_cut=True)
        return sum(pattern.num_steps for pattern in self.patterns) + self.num_parsed

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def from_json(body: str, **options: Any) -> Any:
            self.num_parsed += len(body)
            return read(body, **options)

        def finditer(pattern: str, body: str, flags: Any) -> list[Any]:
            counted = CountedPattern(regex.compile(pattern, flags))
            self.patterns.append(counted)
            return counted.finditer(body)

        read, regex = calls.from_json, content_parsers.re
        monkeypatch.setattr(calls, "from_json", from_json)
        monkeypatch.setattr(content_parsers, "re", SimpleNamespace(finditer=finditer, escape=regex.escape))


QUICK = ("hermes", "llama3")  # the others take 3 to 12 s each


@pytest.mark.parametrize("name", often(ORDER, QUICK))
def test_an_answer_of_twice_the_length_costs_twice_as_much(monkeypatch, name):
    costs = Costs(monkeypatch, name)
    many = {*SPACES, *LETTERS, *beginnings(name)}
    for size, fillers in ((1, {" ", "a", '"', "<"}), (5000, many)):
        for before in ["", *WITHIN[name]]:
            for filler in fillers:
                for behind in ["x", *BEHIND.get(name, [])]:
                    texts = [before + (filler * n)[:n] + behind for n in (400, 800)]
                    small, large = (costs.of(text, size) for text in texts)
                    assert large <= 2.5 * small + 4000, (size, before, filler, behind, small, large)


@pytest.mark.parametrize("name", ORDER)
def test_a_parser_holds_the_text_of_calls_and_no_other(name):
    """Of a call it has the text, and what of it is said: twice at most."""
    form, num_chars = AnswerSyntax(Family.load(name), PLAIN), 8 * MAX_WAITING
    for before in ["", *WITHIN[name]]:
        is_call = before not in ("", "<think>", "[THINK]", *WITHIN["harmony"][-2:])
        for filler in ("a", " ", "<"):
            parser = AnswerParser(form, "", has_calls=True, streams=True)
            parser.push(before)
            sizes = []
            for _ in range(2):
                parser.push(filler * num_chars)
                sizes.append(len(pickle.dumps(parser)))
            assert sizes[1] - sizes[0] <= (2.1 * num_chars if is_call else 100), (before, filler)
            assert is_call or sizes[0] < 8 * MAX_WAITING


@pytest.mark.slow
def test_the_counted_matcher_sees_what_is_quadratic():
    """The patterns that Hermes and Qwen had."""
    import regex

    for pattern, text in (
        (r"\s*<tool_call>\s*", " "),
        (r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", "<parameter=a>"),
    ):
        steps = []
        for n in (500, 1000):
            counted = CountedPattern(regex.compile(pattern, regex.DOTALL))
            counted.finditer((text * n)[:n] + "x")
            steps.append(counted.num_steps)
        assert steps[1] > 3.5 * steps[0]
