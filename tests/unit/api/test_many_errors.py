"""A body with thousands of faults is refused at the first: each would be an error of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from router.api.anthropic.schema import MessagesRequest
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.responses.schema import ResponsesRequest
from router.api.tokens import DetokenizeRequest, TokenizeRequest
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call, error_of

MANY: dict[str, Any] = {f"unknown{idx}": 1 for idx in range(2000)}
HI = {"role": "user", "content": "hi"}
MODELS = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest,
)  # fmt: skip
FAULTS: list[tuple[type[pydantic.BaseModel], str, dict[str, Any]]] = [
    (ChatRequest, "messages[0]", {"messages": [{**HI, **MANY}]}),
    (
        ChatRequest,
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **MANY}]}]},
    ),
    (
        ChatRequest,
        "tools[0].function",
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "a", **MANY}}]},
    ),
    (ChatRequest, "structured_outputs", {"messages": [HI], "structured_outputs": MANY}),
    (ChatRequest, "logit_bias", {"messages": [HI], "logit_bias": dict.fromkeys(map(str, range(900)), "x")}),
    (ResponsesRequest, "input[0]", {"input": [{**HI, **MANY}]}),
    (ResponsesRequest, "metadata", {"input": "hi", "metadata": MANY}),
    (
        MessagesRequest,
        "messages[0].content[0]",
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", **MANY}]}]},
    ),
]
PATHS = {
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
}


@pytest.mark.parametrize(("model", "param", "fields"), FAULTS)
def test_a_body_with_many_faults_has_few_errors(model, param, fields):
    with pytest.raises(pydantic.ValidationError) as error:
        model.model_validate({"model": "org/demo", **fields})
    assert error.value.error_count() <= 4


@pytest.mark.parametrize(("model", "param", "fields"), FAULTS)
def test_the_first_fault_is_named(model, param, fields):
    refused = call(FakeDoor(), "POST", PATHS[model], json={"model": "org/demo", **fields})
    assert refused.status_code == 400
    if model is not MessagesRequest:
        assert error_of(refused)["param"].startswith(param)
    assert param in refused.text


def nodes_of(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "type" in schema:
            yield schema
        for inner in schema.values():
            yield from nodes_of(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from nodes_of(inner)


def judges_items(node: dict[str, Any]) -> bool:
    if node["type"] == "list":
        return node.get("items_schema", {"type": "any"})["type"] != "any"
    return node["type"] == "dict" and node.get("values_schema", {"type": "any"})["type"] != "any"


@pytest.mark.parametrize("model", MODELS)
def test_every_list_ends_at_its_first_fault(model):
    lists = [node for node in nodes_of(model.__pydantic_core_schema__) if judges_items(node)]
    assert lists and all(node.get("fail_fast") or node.get("max_length", 99) <= 16 for node in lists)
