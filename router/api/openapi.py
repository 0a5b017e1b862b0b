"""`/openapi.json`: what this API takes, from the models that check its requests, so that the document is as
true as they are. Answers are described by their types only; errors have a schema. Pure; runs on a thread,
once.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from router.api.adapters import LoadRequest, UnloadRequest
from router.api.anthropic.schema import CountRequest, MessagesRequest
from router.api.audio import TranscriptionRequest, TranslationRequest
from router.api.body import RequestBody
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.protocol import DoorProtocol
from router.api.responses.schema import ResponsesRequest
from router.api.tokens import DetokenizeRequest, TokenizeRequest
from router.http.keys import LOAD_PATH, UNLOAD_PATH

REFERENCE = "#/components/schemas/{model}"
_JSON, _EVENTS, _TEXT, _FORM = "application/json", "text/event-stream", "text/plain", "multipart/form-data"
_HELLO = [{"role": "user", "content": "Hello"}]


class ErrorObject(BaseModel):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None  # the field at fault
    code: str


class ErrorAnswer(BaseModel):
    error: ErrorObject


class AnthropicErrorObject(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class Endpoint(msgspec.Struct, frozen=True):
    summary: str
    answers: tuple[str, ...] = (_JSON,)  # media types of answers that are no errors
    body: type[RequestBody] | None = None
    example: dict[str, Any] | None = {}  # of a body, without its model
    file: str = ""  # the body is a form, and this is its file
    error: type[BaseModel] = ErrorAnswer


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(
        "Answers a conversation", (_JSON, _EVENTS), ChatRequest, {"messages": _HELLO, "max_tokens": 16}
    ),
    "/v1/completions": Endpoint(
        "Continues texts", (_JSON, _EVENTS), CompletionRequest, {"prompt": "Hello", "max_tokens": 16}
    ),
    "/v1/responses": Endpoint("Answers an input", (_JSON, _EVENTS), ResponsesRequest, {"input": "Hello"}),
    "/v1/responses/{response_id}": Endpoint("A background response", (_JSON, _EVENTS)),
    "/v1/responses/{response_id}/cancel": Endpoint("Ends a background response"),
    "/v1/messages": Endpoint(
        "Answers a conversation, as Anthropic's API", (_JSON, _EVENTS), MessagesRequest,
        {"messages": _HELLO, "max_tokens": 16}, error=AnthropicErrorAnswer,
    ),
    "/v1/messages/count_tokens": Endpoint(
        "The length of a conversation", (_JSON,), CountRequest, {"messages": _HELLO},
        error=AnthropicErrorAnswer,
    ),
    "/v1/audio/transcriptions": Endpoint(
        "Writes down what is said", (_JSON, _TEXT, _EVENTS), TranscriptionRequest, None, file="file"
    ),
    "/v1/audio/translations": Endpoint(
        "Writes down in English what is said", (_JSON, _TEXT, _EVENTS), TranslationRequest, None, file="file"
    ),
    "/v1/models": Endpoint("The model"),
    "/v1/models/{model_id}": Endpoint("The model"),
    LOAD_PATH: Endpoint(
        "Loads a LoRA adapter into all workers", (_TEXT,), LoadRequest,
        {"lora_name": "sql", "lora_path": "sql-v2"},
    ),
    UNLOAD_PATH: Endpoint("Unloads a LoRA adapter", (_TEXT,), UnloadRequest, {"lora_name": "sql"}),
    "/tokenize": Endpoint("The tokens of a text or chat", (_JSON,), TokenizeRequest, {"prompt": "Hello"}),
    "/detokenize": Endpoint("The text of tokens", (_JSON,), DetokenizeRequest, {"tokens": [1, 2]}),
    "/version": Endpoint("The version of this server"),
    "/openapi.json": Endpoint("This document"),
    "/health": Endpoint("Whether every pool has a worker", ()),
    "/ready": Endpoint("Whether every pool has a worker", ()),
    "/metrics": Endpoint("Metrics for Prometheus", (_TEXT,)),
}  # fmt: skip

_OTHER = Endpoint("", ())  # of a route that the table does not name: nothing is said about its answers


def document(api: FastAPI, door: DoorProtocol) -> bytes:
    """Describes the routes that `api` has."""
    found = get_openapi(title=api.title, version=api.version, routes=api.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()  # FastAPI's own error
    _define(schemas, ErrorAnswer)
    _define(schemas, AnthropicErrorAnswer)
    for path, operations in found["paths"].items():
        endpoint = ENDPOINTS.get(path, _OTHER)
        for method, operation in operations.items():
            operation["operationId"] = f"{method}{path}".replace("/", "_").translate(
                {ord("{"): None, ord("}"): None}
            )
            operation["summary"] = endpoint.summary or operation["summary"]
            operation["responses"] = _answers(endpoint)
            if door.access.needs_key(path):
                operation["security"] = [{"key": []}]
            if endpoint.body is not None:
                _define(schemas, endpoint.body)
                _add_untyped(endpoint.body, schemas[endpoint.body.__name__])
                operation["requestBody"] = _body(endpoint, endpoint.body, schemas, door.models.model_id)
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(found)


def _answers(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {} for kind in endpoint.answers}
    error = {"description": "an error", "content": {_JSON: {"schema": _reference(endpoint.error)}}}
    return {"200": {"description": "the answer", "content": content}, "4XX": error, "5XX": error}


def _body(
    endpoint: Endpoint, model: type[RequestBody], schemas: dict[str, Any], model_id: str
) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": _reference(model)}
    if endpoint.file:
        schema = schemas[model.__name__]
        schema["properties"][endpoint.file] = {
            "type": "string",
            "contentMediaType": "application/octet-stream",
        }
        schema["required"] = [*schema["required"], endpoint.file]
    if endpoint.example is not None:
        named = {"model": model_id} if "model" in model.model_fields else {}
        content["example"] = {**named, **endpoint.example}
    return {"required": True, "content": {_FORM if endpoint.file else _JSON: content}}


def _add_untyped(model: type[RequestBody], schema: dict[str, Any]) -> None:
    """Adds the fields that `body.parse` takes besides those of a model."""
    for name in model.harmless:
        schema["properties"].setdefault(name, {"description": "has no effect"})
    for name, neutral in model.neutral.items():
        described = {"description": "is not built", "enum": [None, *neutral]}
        schema["properties"].setdefault(name, described)


def _define(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template=REFERENCE)
    schemas |= schema.pop("$defs", {})
    schemas[model.__name__] = schema


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
