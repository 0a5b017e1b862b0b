"""Decides which parser and which structure a chat gets: by the model's own way to write calls, and by what
the request asks for. Made once per door; thread-safe."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cluster.errors import StructureError, UnsupportedError
from cluster.structure.calls import HeldFunction, Reasoning
from cluster.text.answer_format import AnswerSyntax
from cluster.text.tokenizer import TextProcessor
from cluster.types.structure import Structure, StructureKind
from router.answer_text import AnswerText
from router.calls import ChatCall, CompletionCall, ToolFunction, ToolRules
from router.parsing.parser import AnswerParser, ParsedAnswer, is_in_reasoning

MAX_SCHEMA_CHARS = 200_000  # of all functions that are held
PREFIX_TOKENS = 128  # at the end of a prompt: more than templates write after the last message


class AnswerFormats:
    def __init__(self, text: TextProcessor, family: str):
        """`family`: the operator's choice; empty if there is none. Raises ConfigError."""
        self._text = text
        self._own = text.answer_format(family)
        self._generic = text.generic_format()

    def check(self, call: ChatCall) -> None:
        """Checks a call before any work is done. Raises RequestError for tools and variables that this model
        does not take."""
        self._text.template.check(call.options)
        rules = call.tools
        if rules is None or rules.must_call:
            return
        if self._own is None or not self._own.has_calls:
            raise UnsupportedError(
                "tools: it is not known how this model writes calls; only tool_choice 'required' or a named "
                "function can be held",
                param="tools",
            )
        if self._own.calls is not None and self._own.calls.trigger:
            return
        params = [function.param for function in rules.functions if function.is_strict]
        param = params[0].removesuffix("parameters") + "strict" if params else ""
        if call.structure is not None:
            param = call.structure.param
        if param:
            raise UnsupportedError(
                f"{param}: this model writes calls in a form in which it can only be held with tool_choice "
                "'required' or a named function",
                param=param,
            )

    def held(self, call: ChatCall) -> list[HeldFunction]:
        """Returns what is held of the arguments of each function. Each is checked alone, so that an error
        names the one that it is about. Empty: the calls are not constrained. Blocks. Raises
        StructureError."""
        rules, form = call.tools, self._format(call)
        if rules is None or form is None or form.grammar is None or not needs_structure(call):
            return []
        held = [_held(function, rules) for function in rules.functions]
        if sum(len(each.schema) for each in held) > MAX_SCHEMA_CHARS:
            raise StructureError(f"tools: more than {MAX_SCHEMA_CHARS} characters of schemas", param="tools")
        return held

    def structure(self, call: ChatCall, held: Sequence[HeldFunction], prompt: Sequence[int]) -> Structure:
        """Returns the structure of the whole answer. `held`: what the check has left of `held`. Blocks.
        Raises StructureError."""
        rules, form = call.tools, self._format(call)
        if rules is None or form is None or form.grammar is None:
            raise AssertionError("calls that are not constrained")
        if rules.must_call or call.structure is not None:
            answer = None if rules.must_call else call.structure
            where = self._where(form, prompt)
            text = form.grammar.required(held, where, is_parallel=rules.is_parallel, answer=answer)
        else:
            text = form.grammar.triggered(held, is_parallel=rules.is_parallel)
        return Structure(StructureKind.CALLS, text, "tools")

    def answer(
        self, call: ChatCall | CompletionCall, prompt: Sequence[int], text: AnswerText
    ) -> AnswerText | ParsedAnswer:
        form = self._format(call)
        if form is None or isinstance(call, CompletionCall):
            return text
        parser = AnswerParser(
            form,
            self._prefix(prompt),
            has_calls=call.tools is not None,
            streams=call.stream,
            is_parallel=call.tools is None or call.tools.is_parallel,
            tools=[json.loads(tool) for tool in call.options.tools] if form.casts_arguments else (),
        )
        return ParsedAnswer(text, parser, shows_reasoning=call.shows_reasoning)

    def shown_ids(self, call: ChatCall | CompletionCall) -> frozenset[int]:
        """Returns the special tokens that the parser must see."""
        form = self._format(call)
        return frozenset() if form is None else form.shown_ids

    def _format(self, call: ChatCall | CompletionCall) -> AnswerSyntax | None:
        """Returns the format of an answer; None if the answer is text as it is."""
        if isinstance(call, CompletionCall):
            return None
        if call.tools is None:  # an answer under a structure has no room for reasoning
            is_parsed = self._own is not None and self._own.has_reasoning and call.structure is None
            return self._own if is_parsed else None
        if call.tools.must_call and (self._own is None or self._own.calls is None):
            return self._generic
        return self._own

    def _prefix(self, prompt: Sequence[int]) -> str:
        return self._text.text(prompt[-PREFIX_TOKENS:])

    def _where(self, form: AnswerSyntax, prompt: Sequence[int]) -> Reasoning:
        if not form.has_reasoning:
            return Reasoning.NONE
        events = AnswerParser(form, self._prefix(prompt), has_calls=False).initial_events
        if not events:
            return Reasoning.MAY_COME
        return Reasoning.OPEN if is_in_reasoning(events) else Reasoning.NONE


def needs_structure(call: ChatCall) -> bool:
    """Whether something is promised about an answer in which there may be calls."""
    return call.tools is not None and (call.tools.is_constrained or call.structure is not None)


def _held(function: ToolFunction, rules: ToolRules) -> HeldFunction:
    """Returns what is held of one function. Next to strict functions, others only get an object. What must be
    called and is not strict may have any schema."""
    is_held = function.is_strict or rules.must_call
    schema = {"type": "object"} | (json.loads(function.parameters) if is_held else {})
    return HeldFunction(
        function.name,
        json.dumps(schema),
        function.param,
        is_strict=function.is_strict,
        is_loose=not function.is_strict,
    )
