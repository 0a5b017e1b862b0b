"""Translates a request body to a frozen call, with every default filled in. Pure except for the random
seed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from msgspec.structs import asdict

from cluster.errors import RequestError, UnsupportedError
from cluster.media.sources import MediaSource
from cluster.text.chat import ChatMessage, ChatOptions
from cluster.text.defaults import GenerationDefaults
from cluster.types.request import LogitChanges, SamplingParams
from cluster.types.structure import Structure, StructureKind
from router.api.chat.messages import media_options, messages_of, negative_of
from router.api.chat.schema import (
    ChatRequest,
    CompletionRequest,
    EndpointRequest,
    InputMessage,
    RefusalPart,
    StreamOptions,
    TextPart,
)
from router.api.chat.structure import structure_of
from router.api.chat.tools import options_of, rules_of, tool_texts
from router.api.fields import MAX_PARTS, MAX_PRIORITY
from router.api.protocol import CallContext
from router.calls import (
    Call,
    ChatCall,
    CompletionCall,
    GuidanceRules,
    MediaRules,
    StopRules,
    ToolRules,
)
from router.http.limits import Limits
from router.overlong import too_long_list, too_long_text, too_many_tokens

SEED_MASK = 2**64 - 1
# Below it draws are greedy, as in vLLM: logits divided by the smallest temperatures leave float32
MIN_TEMPERATURE = 1e-5
SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring choices get seeds far apart
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


def chat_call(request: ChatRequest, context: CallContext) -> ChatCall:
    """Raises RequestError."""
    limits = context.limits
    adapter = context.models.adapter_of(request.model)
    _check(request, context)
    rules = rules_of(request)
    tools = tool_texts(request)
    _check_text(sum(map(len, tools)), "tools", limits)
    shown = options_of(request, tools)
    _check_messages(request.messages, shown, limits)
    media: list[MediaSource] = []
    messages = messages_of(request.messages, media_options(request), media)
    call = _call(
        request,
        context,
        adapter,
        max_tokens=_max_tokens(request),
        num_logprobs=_num_logprobs(request),
        negative=lambda text: negative_of(messages, text),
    )
    if rules is not None:
        _check_together(rules, call.structure, request.min_tokens or 0)
    return ChatCall(
        **asdict(call),
        messages=messages,
        media=tuple(media),
        media_rules=MediaRules(
            request.max_media_tokens, bool(request.exact_media), request.on_media_error == "omit"
        ),
        options=shown,
        tools=rules,
        shows_reasoning=request.include_reasoning is not False,
    )


def completion_call(request: CompletionRequest, context: CallContext) -> CompletionCall:
    """Raises RequestError."""
    adapter = context.models.adapter_of(request.model)
    _check(request, context)
    if request.best_of not in (None, request.n or 1):
        raise UnsupportedError("best_of: answers are not ranked; it must equal n", param="best_of")
    max_tokens = _max_tokens(request)
    if max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens: 0 needs echo: true", param="max_tokens")
    prompts = _prompts(request.prompt, context.limits)
    call = _call(
        request,
        context,
        adapter,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(1, max_tokens),
        num_logprobs=request.logprobs,
        negative=lambda text: text,
    )
    return CompletionCall(**asdict(call), prompts=prompts, echo=bool(request.echo), generates=max_tokens != 0)


def _call(
    request: EndpointRequest,
    context: CallContext,
    adapter: str,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    negative: Callable[[str], tuple[ChatMessage, ...] | str],
) -> Call:
    """Translates what both endpoints have. `negative`: a negative prompt as the endpoint has its prompts."""
    limits, defaults = context.limits, context.defaults
    options = request.stream_options or StreamOptions()
    return Call(
        model=request.model,
        adapter=adapter,
        tenant=context.tenant,
        cache_salt=_salt(request, context),
        trace_parent=context.trace_parent,
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        usage_in_events=bool(options.include_usage and options.continuous_usage_stats),
        structure=structure_of(request, request.min_tokens),
        changes=_changes(request, limits),
        bad_words=tuple(request.bad_words or ()),
        skips_special=request.skip_special_tokens is not False,
        returns_token_ids=bool(request.return_token_ids),
        num_prompt_logprobs=request.prompt_logprobs,
        sampling=_sampling(request, defaults, limits),
        stop=_stop(request, max_tokens, defaults),
        num_logprobs=num_logprobs,
        guidance=_guidance(request, negative),
    )


def _max_tokens(request: EndpointRequest) -> int | None:
    max_tokens = request.max_completion_tokens or request.max_tokens
    if request.max_tokens not in (None, max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    return max_tokens


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _changes(request: EndpointRequest, limits: Limits) -> LogitChanges | None:
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError("logit_bias: keys must be token ids", param="logit_bias")
        biases[int(key)] = bias
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    _check_ids(list(biases), "logit_bias", limits)
    _check_ids(allowed, "allowed_token_ids", limits)
    changes = LogitChanges(
        bias=tuple((token_id, bias) for token_id, bias in biases.items() if bias),
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        allowed_token_ids=allowed,
    )
    return None if changes == LogitChanges() else changes


def _check(request: EndpointRequest, context: CallContext) -> None:
    """Checks the fields whose limits depend on the model and on its operator."""
    limits = context.limits
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs are not streamed", param="prompt_logprobs")
    if (request.priority or 0) < limits.min_priority:
        allowed = f"between {limits.min_priority} and {MAX_PRIORITY}"
        raise RequestError(f"priority: this server accepts values {allowed}", param="priority")
    _check_ids(request.stop_token_ids or (), "stop_token_ids", limits)
    _check_text(len(request.negative_prompt or ""), "negative_prompt", limits)
    for name, count in (
        ("max_tokens", request.max_tokens),
        ("max_completion_tokens", request.max_completion_tokens),
        ("min_tokens", request.min_tokens),
    ):
        if count is not None and count > limits.max_model_len:
            raise too_many_tokens(count, limits.max_model_len, param=name)


def _check_ids(token_ids: Sequence[int], param: str, limits: Limits) -> None:
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise RequestError(f"{param}: token ids must be between 0 and {limits.vocab_size - 1}", param=param)


def check_prompt(prompt: str | Sequence[int], param: str, limits: Limits) -> None:
    """Checks a text, or token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return _check_text(len(prompt), param, limits)
    _check_ids(prompt, param, limits)
    if len(prompt) > limits.max_model_len:
        raise too_long_list(len(prompt), limits.max_model_len, param=param)


def _check_text(num_chars: int, param: str, limits: Limits) -> None:
    if num_chars > limits.max_text_chars:
        raise too_long_text(num_chars, limits.max_text_chars, limits.max_model_len, param=param)


def _check_messages(messages: Sequence[InputMessage], options: ChatOptions, limits: Limits) -> None:
    num_chars = num_parts = 0
    for message in messages:
        num_chars += len(message.reasoning_content or message.reasoning or "") + len(message.refusal or "")
        called = [call.function for call in message.tool_calls or ()]
        num_chars += sum(len(function.name) + len(function.arguments) for function in called)
        if isinstance(message.content, str):
            num_chars += len(message.content)
        elif message.content is not None:
            num_parts += len(message.content)
            texts = [part for part in message.content if isinstance(part, TextPart | RefusalPart)]
            num_chars += sum(len(part.text) for part in texts)
    if num_parts > MAX_PARTS:
        raise RequestError(f"messages: at most {MAX_PARTS} content parts are accepted", param="messages")
    _check_text(num_chars, "messages", limits)
    num_chars += sum(map(len, options.tools)) + sum(len(value) for _, value in options.variables)
    _check_text(num_chars, "tools", limits)


def _check_together(rules: ToolRules, structure: Structure | None, min_tokens: int) -> None:
    """Raises RequestError for structures that exclude each other. Calls of tools that are constrained are a
    structure themselves, in which there is room for JSON."""
    if structure is not None and structure.kind is not StructureKind.JSON_SCHEMA:
        raise RequestError(
            f"{structure.param} cannot be combined with tools, unless tool_choice is 'none'",
            param=structure.param,
        )
    if min_tokens and rules.is_constrained:
        raise RequestError("min_tokens cannot be combined with tools that are held", param="min_tokens")


def _salt(request: EndpointRequest, context: CallContext) -> str:
    """Returns the salt. Only KV and embeddings with an equal salt are reused: those of the same tenant, under
    the client's own salt. Clients without credentials are one tenant."""
    owner = "" if context.limits.shares_caches else context.tenant
    return f"{owner}/{request.cache_salt or ''}" if owner or request.cache_salt else ""


def _sampling(
    request: EndpointRequest, defaults: GenerationDefaults, limits: Limits
) -> tuple[SamplingParams, ...]:
    """Returns one value per choice. Choice 0 draws with the client's seed, the others with seeds derived from
    it."""
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_p = defaults.top_p if request.top_p is None else request.top_p
    if top_p == 0 or temperature < MIN_TEMPERATURE:  # of the smallest set the most probable token is left
        temperature, top_p = 0.0, 1.0
    top_k = defaults.top_k if request.top_k is None else request.top_k
    top_k = top_k if 0 < top_k < limits.vocab_size else 0  # 0: of all tokens
    min_p = defaults.min_p if request.min_p is None else request.min_p
    seed = secrets.randbits(64) if request.seed is None and temperature > 0 else (request.seed or 0)
    return tuple(
        SamplingParams(temperature, top_p, top_k, min_p, (seed + choice * SEED_STEP) & SEED_MASK)
        for choice in range(request.n or 1)
    )


def _stop(request: EndpointRequest, max_tokens: int | None, defaults: GenerationDefaults) -> StopRules:
    eos = () if request.ignore_eos else defaults.eos_token_ids
    token_ids = dict.fromkeys((*eos, *(request.stop_token_ids or ())))
    stop = request.stop or ()
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError("min_tokens is larger than max_tokens", param="min_tokens")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return StopRules(
        max_tokens, tuple(token_ids), strings, min_tokens, bool(request.include_stop_str_in_output)
    )


def _guidance(
    request: EndpointRequest,
    negative: Callable[[str], tuple[ChatMessage, ...] | str],
) -> GuidanceRules | None:
    if request.guidance_scale is None or request.guidance_scale == 1:
        if request.negative_prompt is not None:
            raise RequestError("negative_prompt needs a guidance_scale other than 1", param="negative_prompt")
        return None
    text = request.negative_prompt
    return GuidanceRules(request.guidance_scale, None if text is None else negative(text))


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]], limits: Limits
) -> tuple[str | tuple[int, ...], ...]:
    prompts = _listed(prompt)
    for each in prompts:
        check_prompt(each, "prompt", limits)
    return prompts


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    token_ids = tuple(item for item in prompt if isinstance(item, int))
    if token_ids:  # one prompt as token ids
        return (token_ids,)
    return tuple(
        item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)
    )
