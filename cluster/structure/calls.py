"""Calls of tools as a grammar: answers that must contain a call, and answers whose calls have arguments
that are valid under a schema. Pure.

The grammar is text for llguidance (Lark), in which arguments are JSON schemas and special tokens are ids.
It is a structure like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

import msgspec

from cluster.errors import StructureError
from cluster.structure.grammar import json_options
from cluster.structure.schema import held_schema
from cluster.types.structure import Structure, StructureKind

_PLACES = re.compile(r"\$(name|arguments)")


class CallForm(msgspec.Struct, frozen=True):
    """How a model writes calls: `begin`, a call, others after `between`, `end`."""

    call: str  # `$name` and `$arguments` stand for the function's name and for the JSON of its arguments
    begin: str = ""
    between: str | None = None  # None: an answer has one call
    end: str = ""
    # the beginning of `begin` and `call`: after it in a text there is a call. Empty: unknown
    trigger: str = ""


class ReasoningForm(msgspec.Struct, frozen=True):
    """How a model writes reasoning before a call."""

    begin: str
    end: str
    gap: str = ""  # between the end and a call


class Reasoning(Enum):
    """Where an answer begins."""

    NONE = "behind all reasoning"
    MAY_COME = "before it, if there is any"
    OPEN = "in it"


class HeldFunction(msgspec.Struct, frozen=True):
    name: str
    schema: str  # JSON schema of the arguments, as JSON
    param: str  # the field of the request that has it; errors name it
    is_strict: bool = False  # words that are no keywords of JSON Schema are refused
    is_loose: bool = False  # the schema is what can be held of another one

    @property
    def structure(self) -> Structure:
        """Its arguments alone."""
        return Structure(
            StructureKind.JSON_SCHEMA,
            self.schema,
            self.param,
            is_strict=self.is_strict,
            is_loose=self.is_loose,
        )


class CallGrammar:
    """Makes the grammars of one model."""

    def __init__(self, calls: CallForm, reasoning: ReasoningForm | None, special_ids: Mapping[str, int]):
        """`special_ids`: of the special tokens, by their text. Only as such can they be in an answer."""
        self._calls = calls
        self._reasoning = reasoning
        self._special_ids = special_ids
        self._special = re.compile("|".join(map(re.escape, special_ids)) or "(?!)")

    def required(
        self,
        functions: Sequence[HeldFunction],
        where: Reasoning,
        *,
        is_parallel: bool,
        answer: Structure | None = None,
    ) -> str:
        """Answers that are calls and nothing else, after reasoning. `answer`: a JSON schema; JSON that is
        valid under it may come instead. Raises StructureError."""
        before = "" if where is Reasoning.NONE or self._reasoning is None else "reasoning"
        main = "calls" if answer is None else "(calls | answer)"
        lines = [f"start: {before}{'?' * (where is Reasoning.MAY_COME and bool(before))} {main}"]
        if answer is not None:
            lines.append(f"answer: %json {_schema(answer.text, answer.param, answer)}")
        if before and self._reasoning is not None:
            begin = "" if where is Reasoning.OPEN else self._literal(self._reasoning.begin)
            lines += self._through("thought", self._reasoning.end)
            lines.append(f"reasoning: {begin} thought {self._literal(self._reasoning.gap)}")
        return "\n".join([*lines, *self._rules(functions, self._calls.begin, is_parallel)])

    def triggered(self, functions: Sequence[HeldFunction], *, is_parallel: bool) -> str:
        """Answers of text and calls. Raises StructureError."""
        trigger = self._calls.trigger
        many = "(head calls)* TEXT" if is_parallel else "TEXT | head calls"
        lines = [f"start: {many}", *self._through("head", trigger)]
        return "\n".join([*lines, *self._rules(functions, self._calls.begin, is_parallel, trigger)])

    def _through(self, rule: str, end: str) -> list[str]:
        """Any text, up to and with this one."""
        is_lazy = "" if end in self._special_ids else "[lazy]"
        return [f"{rule}{is_lazy}: TEXT {self._literal(end)}", r"TEXT: /(.|\n)*/"]

    def _rules(
        self, functions: Sequence[HeldFunction], begin: str, is_parallel: bool, trigger: str = ""
    ) -> Iterator[str]:
        """The rule `calls`, without what `trigger` has."""
        form = self._calls
        others, end = self._others(functions, is_parallel), self._literal(form.end)
        yield f"calls: ({_any('first', functions)}) {others} {end}"
        for idx, function in enumerate(functions):
            whole = begin + form.call
            if not whole.startswith(trigger):
                raise ValueError(f"the form of a call does not begin with {trigger!r}")
            yield f"first_{idx}: {self._call(whole.removeprefix(trigger), idx, function)}"
            yield f"call_{idx}: {self._call(form.call, idx, function)}"
            yield f"arguments_{idx}: %json {_schema(function.schema, function.param, function)}"

    def _others(self, functions: Sequence[HeldFunction], is_parallel: bool) -> str:
        between = self._calls.between
        if between is None or not is_parallel:
            return ""
        return f"({self._literal(between)} ({_any('call', functions)}))*"

    def _call(self, text: str, idx: int, function: HeldFunction) -> str:
        values = {"name": json.dumps(function.name), "arguments": f"arguments_{idx}"}
        parts = _PLACES.split(text)  # text, place, text, place, …
        return " ".join(values[part] if i % 2 else self._literal(part) for i, part in enumerate(parts))

    def _literal(self, text: str) -> str:
        written, at = [], 0
        for found in self._special.finditer(text):
            written += [json.dumps(text[at : found.start()]), f"<[{self._special_ids[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in (*written, json.dumps(text[at:])) if part != '""')


def _any(rule: str, functions: Sequence[HeldFunction]) -> str:
    return " | ".join(f"{rule}_{idx}" for idx in range(len(functions)))


def _schema(text: str, param: str, rules: HeldFunction | Structure) -> str:
    """A schema as a part of a grammar. Raises StructureError."""
    try:
        held = held_schema(text, is_strict=rules.is_strict)
    except StructureError as error:
        raise StructureError(f"{param}: {error.message}", param=param) from None
    is_compact = isinstance(rules, Structure) and rules.is_compact
    options = json_options(is_compact=is_compact, is_loose=rules.is_loose)
    return json.dumps({"x-guidance": options, **json.loads(held)})
