"""How a model writes reasoning and calls of tools: the response template of its checkpoint, or that of its
family (`cluster.text.formats`). Frozen; reads files when it is made."""

from __future__ import annotations

import copy
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.errors import ConfigError
from cluster.structure.calls import CallForm, CallGrammar, ReasoningForm
from cluster.structure.vocabulary import is_special
from cluster.text.formats import ORDER

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

CALLS = "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")  # as templates of chats and of responses call it
GENERIC = "hermes"  # for calls that a model has to write in a form that it does not know


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `cluster.text.formats`."""

    when: tuple[str, ...]
    template: dict[str, Any]
    calls: CallForm | None = None
    reasoning: ReasoningForm | None = None
    id_chars: int = 0

    @classmethod
    def load(cls, name: str) -> Family:
        """Raises ConfigError."""
        if name not in ORDER:
            raise ConfigError(f"answer_format: known are {', '.join(ORDER)}", param="door.answer_format")
        file = resources.files("cluster.text.formats").joinpath(f"{name}.json")
        return msgspec.json.decode(file.read_bytes(), type=cls)


class AnswerSyntax:
    def __init__(self, family: Family, tokenizer: Any, *, can_reason: bool = True):
        """`tokenizer`: of transformers. `can_reason`: its reasoning is looked for. Raises ConfigError."""
        self._template = copy.deepcopy(family.template)
        self._fields: dict[str, Any] = self._template["fields"]
        if not can_reason:
            for name in REASONING:
                self._fields.pop(name, None)
        self.id_chars = family.id_chars
        self.has_reasoning = any(name in self._fields for name in REASONING)
        added = {
            token_id: str(token)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        written = "\0".join(_strings(self._template)).replace("\\", "")
        self.shown_ids = frozenset(token_id for token_id, token in added.items() if token in written)
        self.calls = family.calls
        special_ids = {
            str(token): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if is_special(str(token), is_marked=token.special)
        }
        reasoning = family.reasoning if self.has_reasoning else None
        self.grammar = None if self.calls is None else CallGrammar(self.calls, reasoning, special_ids)
        try:
            self.fields = self.loaded.fields
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"the model's response template cannot be used: {error}", param="model"
            ) from error

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str) -> AnswerSyntax | None:
        """None: the checkpoint has no response template, and its chat template is of no known family. Raises
        ConfigError."""
        families = map(Family.load, ORDER)
        known = next((each for each in families if all(text in chat_template for text in each.when)), None)
        template = getattr(tokenizer, "response_template", None)
        if template is not None:
            form = known.calls if known is not None and _reads(template, known.calls) else None
            return cls(
                Family((), template, form, known and known.reasoning, known.id_chars if known else 0),
                tokenizer,
            )
        if known is None:
            return None
        can_reason = known.reasoning is not None and known.reasoning.begin in chat_template
        return cls(known, tokenizer, can_reason=can_reason)

    @property
    def has_calls(self) -> bool:
        return CALLS in self._fields

    @property
    def casts_arguments(self) -> bool:
        """Calls have arguments as text; the tool's schema says what they are."""
        return self.has_calls and self.fields[CALLS].content != "json"

    @cached_property
    def loaded(self) -> ResponseTemplate:
        """The syntax as transformers reads it: patterns, and how the text of a call is parsed."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        return load_response_template(self._template)

    @cached_property
    def with_calls(self) -> ResponseTemplate:
        return self._regions(has_calls=True)

    @cached_property
    def without_calls(self) -> ResponseTemplate:
        """What looks like a call is text."""
        return self._regions(has_calls=False)

    def _regions(self, *, has_calls: bool) -> ResponseTemplate:
        """The template that finds regions and leaves their text as it is. A call has the named groups of its
        pattern next to it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields = {}
        for name, field in self._fields.items():
            if name == CALLS and not has_calls:
                continue
            delimiters = ("open", "open_pattern", "close", "close_pattern")
            kept = {key: field[key] for key in delimiters if key in field}
            kept |= {key: _bare(kept[key]) for key in ("open_pattern", "close_pattern") if key in kept}
            groups = self.fields[name].open_re.groupindex if self.fields[name].open_re else {}
            captures = {group: f"{{{group}}}" for group in groups}
            transform = {"body": "{content}", "captures": captures}
            fields[name] = {
                **kept,
                "content": "text",
                "content_args": {"strip": False},
                "transform": transform,
            }
        anchors = {
            key: self._template[key]
            for key in ("start_anchor", "start_anchor_pattern")
            if key in self._template
        }
        return load_response_template({**anchors, "fields": fields})


def _bare(pattern: str) -> str:
    """The text without the white space around it, which the parser of an answer drops: looking for it at each
    place of a long run takes time in proportion to the square of its length."""
    return pattern.removeprefix(r"\s*").removesuffix(r"\s*")


def _reads(template: dict[str, Any], form: CallForm | None) -> bool:
    """Whether calls in this form are calls to this response template."""
    from transformers.utils.chat_parsing import parse_response

    if form is None:
        return False
    text = form.begin + form.call.replace("$name", "f").replace("$arguments", '{"a": 1}') + form.end
    try:
        (call,) = parse_response(text, template, prefix="").get(CALLS, [])
        return call["function"]["name"] == "f" and call["function"]["arguments"] == {"a": 1}
    except (ValueError, KeyError, TypeError):
        return False


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _strings(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _strings(inner)]
    return [value] if isinstance(value, str) else []
