"""/tokenize and /detokenize, with vLLM's fields: the tokens of a text or of a conversation, and back. No
worker is asked. A media item has the tokens that stand for it in the prompt; it is fetched and opened for
that.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from cluster.errors import RequestError
from router.calls import TokenizeCall, Tokenized
from router.openai.fields import TokenId
from router.openai.schema import ChatRequest, Messages, RequestBody
from router.openai.tools import Tools, Variables
from router.openai.translate import CallContext, chat_call, check_model, check_prompt


class TokenizeRequest(RequestBody):
    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool | None = None  # of a prompt: default true; a conversation's template says all
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    model: str
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def tokenize_call(request: TokenizeRequest, context: CallContext) -> TokenizeCall:
    """Raises RequestError."""
    check_model(request.model, context.model_id)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    names = bool(request.return_token_strs)
    if request.prompt is not None:
        check_prompt(request.prompt, "prompt", context.limits)
        return TokenizeCall(request.prompt, names, request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise RequestError("add_special_tokens belongs to a prompt", param="add_special_tokens")
    chat = ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": request.messages,
            "tools": request.tools,
            "chat_template_kwargs": request.chat_template_kwargs,
        }
    )
    return TokenizeCall(chat_call(chat, context), names)


def ids_to_detokenize(request: DetokenizeRequest, context: CallContext) -> list[int]:
    """Raises RequestError."""
    check_model(request.model, context.model_id)
    check_prompt(request.tokens, "tokens", context.limits)
    return request.tokens


def tokenized(found: Tokenized, max_model_len: int) -> bytes:
    return msgspec.json.encode(
        {
            "count": len(found.token_ids),
            "max_model_len": max_model_len,
            "tokens": found.token_ids,
            "token_strs": found.names,
        }
    )


def detokenized(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})
