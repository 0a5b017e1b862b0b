"""The model's chat template: a conversation to the text of its prompt.

Owns nothing but the template, which is transformers' (of the processor if it has one, else of the
tokenizer). Thread safe. Special tokens that texts of a client form, also in tools and variables, come out
marked, so that they are encoded as letters (`cluster.text.typed`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from cluster.errors import RequestError, UnsupportedError
from cluster.text.answer_format import REASONING
from cluster.text.chat import NO_OPTIONS, ChatMessage, ChatOptions, ChatText
from cluster.text.typed import ControlTokens, Typed


class ChatTemplate:
    def __init__(self, tokenizer: Any, processor: Any, placeholders: Iterable[str] = ()):
        """`processor`: transformers' own, for a model that takes media. `placeholders`: what the template
        writes for media items; without them it expects strings."""
        self._tokenizer = tokenizer
        has_template = getattr(processor, "chat_template", None) is not None
        self._owner = processor if has_template else tokenizer
        self._placeholders = tuple(placeholders)
        self._control: dict[str, ControlTokens] = {}  # by template
        self._wants_parts = self.exists and not self._renders_strings()

    @property
    def exists(self) -> bool:
        return self._owner.chat_template is not None

    @property
    def source(self) -> str:
        """The source of the template that is used with tools. Empty if there is none."""
        return self._source(has_tools=True)

    def check(self, options: ChatOptions) -> None:
        """Raises RequestError for options that this template does not have."""
        if options.tools and not self.takes_tools:
            raise UnsupportedError(
                "this model's chat template takes no tools; leave them out or set tool_choice to 'none'",
                param="tools",
            )
        for name, _ in options.variables:
            if not self.has_variable(name):
                raise _no_variable(f"chat_template_kwargs.{name[:64]}")
        if options.hint_param and not any(self.has_variable(name) for name, _ in options.hints):
            raise _no_variable(options.hint_param)

    @property
    def takes_tools(self) -> bool:
        return "tools" in self._variables

    def has_variable(self, name: str) -> bool:
        """Whether a client may set it."""
        return name in self._variables and name not in self._reserved

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> str:
        """Renders the conversation up to where the answer begins. Raises RequestError if the template refuses
        the conversation."""
        self.check(options)
        conversation = [self._message(message) for message in messages]
        try:
            return self._render(conversation, options)
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # templates are programs
            raise RequestError("the chat template cannot render these messages", param="messages") from error

    def _render(self, conversation: list[dict[str, Any]], options: ChatOptions = NO_OPTIONS) -> str:
        tools = [json.loads(tool) for tool in options.tools] or None
        hints = [hint for hint in options.hints if self.has_variable(hint[0])]
        variables = {name: json.loads(value) for name, value in (*hints, *options.variables)}
        typed = Typed(self._control_tokens(self._source(has_tools=tools is not None)))
        # Roles are the API's own words: templates write control tokens of them
        messages = [typed.marked(message) | {"role": message["role"]} for message in conversation]
        text = self._owner.apply_chat_template(
            messages,
            tools=typed.marked(tools),
            add_generation_prompt=True,
            tokenize=False,
            **{name: typed.marked(value) for name, value in variables.items()},
        )
        return typed.resolved(text)

    def _control_tokens(self, source: str) -> ControlTokens:
        if source not in self._control:
            from transformers.utils.chat_template_utils import _get_template_literal_text

            tokens = self._tokenizer._get_control_tokens(source)
            literals = _get_template_literal_text(source).split("\0")
            self._control[source] = ControlTokens((*tokens, *self._placeholders), literals)
        return self._control[source]

    def _source(self, *, has_tools: bool) -> str:
        template = self._owner.chat_template
        if isinstance(template, dict):  # only a tokenizer chooses by the tools
            is_tool_use = has_tools and "tool_use" in template and self._owner is self._tokenizer
            return template["tool_use" if is_tool_use else "default"]
        return template or ""

    @cached_property
    def _variables(self) -> frozenset[str]:
        from transformers.utils.chat_template_utils import _get_template_variables

        return _get_template_variables(self.source)

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """What the server, or the tokenizer, says to the template."""
        arguments = inspect.signature(self._owner.apply_chat_template).parameters
        return frozenset(("messages", *arguments, *self._tokenizer.special_tokens_map))

    @cached_property
    def _reasoning_key(self) -> str:
        return next((key for key in REASONING if key in self.source), REASONING[0])

    def _renders_strings(self) -> bool:
        """Whether the template takes a message's content as a string; some take only lists of parts."""
        try:
            return "words" in self._render([{"role": "user", "content": "words"}])
        except Exception:  # templates are programs
            return False

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        if message.name:
            fields["name"] = message.name
        if message.reasoning:
            fields[self._reasoning_key] = message.reasoning
        return fields

    def _content(self, message: ChatMessage) -> Any:
        if isinstance(message.content, str):
            if self._wants_parts:
                return [{"type": "text", "text": message.content}] if message.content else []
            return message.content
        if not self._placeholders:  # templates of text-only models expect a string
            return "\n".join(part.text for part in message.content if isinstance(part, ChatText))
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, ChatText)
            else {"type": part.modality.value}
            for part in message.content
        ]


def _no_variable(param: str) -> RequestError:
    return RequestError(f"{param}: this model's chat template has no such variable", param=param)
