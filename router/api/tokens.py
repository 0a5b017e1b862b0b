"""/tokenize and /detokenize, with vLLM's fields: the tokens of a text or of a conversation, and back. No
worker is asked. A media item has the tokens that stand for it in the prompt; it is fetched and opened for
that. Pure.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.errors import RequestError
from router.api.body import RequestBody
from router.api.chat.schema import ChatRequest, Messages
from router.api.chat.tools import Tools, Variables
from router.api.chat.translate import chat_call, check_prompt
from router.api.fields import TokenId
from router.api.protocol import CallContext
from router.calls import TokenizeCall


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
    context.models.adapter_of(request.model)
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
    context.models.adapter_of(request.model)
    check_prompt(request.tokens, "tokens", context.limits)
    return request.tokens
