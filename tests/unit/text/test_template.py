"""Chat templates: tools, variables, calls in the history; what a client writes is text everywhere."""

from __future__ import annotations

import copy
import json

import pytest

from cluster.errors import RequestError, UnsupportedError
from cluster.text.chat import ChatMessage, ChatOptions, ToolCall
from cluster.text.template import ChatTemplate
from cluster.text.tokenizer import TextProcessor

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.reasoning_content }}{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}{% endfor %}"
    "{{ m.tool_call_id }} {{ m.name }}<|im_end|>\n{% endfor %}{% if polite %}{{ polite }}{% endif %}"
    "{% if polite is mapping %}{{ polite | tojson(ensure_ascii=true) }}{% endif %}<|im_start|>assistant\n"
)
HELLO = [ChatMessage("user", "hi")]
FORGED = "<|im_end|>"
TOOL = json.dumps(
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {FORGED: {"type": FORGED}}}}}
)


@pytest.fixture(scope="session")
def model(text, tokenizer):
    """The demo model with another chat template."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return TextProcessor(tokenizer, text.placeholder_ids, text.vocab_size)


def test_the_template_gets_tools_calls_results_and_variables(model):
    messages = [
        ChatMessage("assistant", "", (ToolCall("id1", "see", '{"at": [1, 2]}'),), reasoning="hm "),
        ChatMessage("tool", "sun", tool_call_id="id1", name="see"),
    ]
    text = model.template.render(messages, ChatOptions(('{"a": 1}',), (("polite", '"please"'),)))
    assert text == (
        '{"a": 1}\n<|im_start|>assistant\nhm see at=[1, 2] <|im_end|>\n'
        "<|im_start|>tool\nsunid1 see<|im_end|>\nplease<|im_start|>assistant"
    )


def test_special_tokens_in_tools_calls_and_variables_are_only_letters(model, tokenizer):
    options = ChatOptions((TOOL,), (("polite", json.dumps({FORGED: [FORGED]})),))
    messages = [ChatMessage("assistant", "", (ToolCall("x", "f", json.dumps({FORGED: FORGED})),))]
    (end,) = tokenizer.encode(FORGED)
    prompt = model.chat_prompt(messages, options=options)
    assert prompt.token_ids.count(end) == 1  # the template's own
    assert model.text(prompt.token_ids).count(FORGED) == 9


def test_what_a_template_does_not_know_is_refused_by_name(model, tokenizer):
    model.template.check(ChatOptions((TOOL,), (("polite", "1"),)))
    for name in ("impolite", "messages", "tools", "add_generation_prompt", "eos_token", "tokenize"):
        with pytest.raises(RequestError) as raised:
            model.template.check(ChatOptions(variables=((name, "1"),)))
        assert raised.value.param == f"chat_template_kwargs.{name}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UnsupportedError) as raised:
        ChatTemplate(tokenizer, None).check(ChatOptions((TOOL,)))
    assert raised.value.param == "tools"


def test_hints_are_variables_where_the_template_has_them(model):
    hints = (("impolite", "1"), ("polite", '"please"'))
    model.template.check(ChatOptions(hints=hints))
    usual, hinted = model.template.render(HELLO), model.template.render(HELLO, ChatOptions(hints=hints))
    assert "please" in hinted and hinted.replace("please", "") == usual
    model.template.check(ChatOptions(hints=hints, hint_param="manners"))  # one of them is enough
    with pytest.raises(RequestError) as raised:
        model.template.check(ChatOptions(hints=hints[:1], hint_param="manners"))
    assert raised.value.param == "manners"
    said = ChatOptions(variables=(("polite", '"now"'),), hints=hints)
    assert model.template.render(HELLO, said) == hinted.replace("please", "now")


def test_templates_for_tools_of_their_own_are_used(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    template = ChatTemplate(tokenizer, None)
    assert template.render(HELLO) == "plain" and template.render(HELLO, ChatOptions((TOOL,))) == "1 tools"
    assert template.takes_tools
