"""Request bodies as pydantic models: what all endpoints have in common.

There are three kinds of fields:

* Implemented ones are typed in an endpoint's model.
* Harmless ones are accepted and have no effect on the answer.
* Neutral ones would change the answer but are not implemented, so only values that change nothing are
  accepted.

Any other field is refused, with the nearest known name in the message. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pydantic

from cluster.errors import RequestError, UnsupportedError
from router.api.fields import StrictModel

Harmless = Any
# Field → values that change nothing; None is always one of them
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "return_tokens_as_token_ids": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
HARMLESS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "request_id", "session_id",
    "spaces_between_special_tokens",
)  # fmt: skip


class RequestBody(StrictModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL
    harmless: ClassVar[tuple[str, ...]] = HARMLESS


_FIELDS = pydantic.TypeAdapter(dict[str, Any])
Request = TypeVar("Request", bound=RequestBody)


def parse(model: type[Request], body: bytes) -> Request:
    """Returns a valid request. Raises RequestError or UnsupportedError; messages name fields, not values."""
    try:
        fields = _FIELDS.validate_json(body)
    except pydantic.ValidationError as error:
        why = error.errors(include_url=False)[0].get("ctx", {}).get("error", "")
        raise RequestError(f"the body is not a JSON object{why and f': {why}'}") from error
    return validated(model, fields, model.model_validate)


def validated(
    model: type[Request], fields: dict[str, Any], validate: Callable[[dict[str, Any]], Request]
) -> Request:
    """Does as `parse` with fields that are read already. `validate`: a method of the model."""
    known = model.model_fields
    for name in list(fields):
        if name in known:
            continue
        value = fields.pop(name)
        if name in model.harmless:
            continue
        if name not in model.neutral:
            names = [*known, *model.neutral, *model.harmless]
            near = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {name[:64]!r}{hint}", param=name[:64])
        if value is not None and not any(_is_same(value, neutral) for neutral in model.neutral[name]):
            raise UnsupportedError(f"{name!r} is not supported by this server", param=name)
    try:
        return validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal; False is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(error: pydantic.ValidationError) -> RequestError:
    """The error with the deepest location: of a union's branches, the one that matched furthest."""
    details = max(error.errors(include_url=False, include_input=False), key=lambda item: len(item["loc"]))
    path = _path(details["loc"])
    is_other_tool = "tool" in path and path.endswith("type")  # only functions can be called
    if details["type"] == "union_tag_not_found":
        return RequestError(f"{path}.type: Field required", param=f"{path}.type")
    if (is_other_tool and details["type"] != "missing") or details["type"] == "none_required":
        return UnsupportedError(f"{path}: not supported by this server", param=path)
    if details["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return RequestError(f"{path}: Input should be an object", param=path)
    if limit := _limit(details):
        return RequestError(f"{path}: this server accepts {limit}", param=path)
    if details["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path!r}", param=path)
    if details["type"] == "union_tag_invalid":
        expected = details.get("ctx", {}).get("expected_tags", "")
        return RequestError(f"{path}: unknown part type; known are {expected}", param=path)
    return RequestError(f"{path}: {details['msg']}", param=path)


def _limit(details: Any) -> str:
    """Returns what a value or a list is bounded by; empty if something else is wrong."""
    bounds = details.get("ctx", {})
    match details["type"]:
        case "less_than_equal":
            return f"at most {bounds['le']:g}"
        case "greater_than_equal":
            return f"at least {bounds['ge']:g}"
        case "too_long":
            return f"at most {bounds['max_length']} items"
        case _:
            return ""


_BRANCHES = {"text", "refusal", "image_url", "video_url", "audio_url", "input_audio"} | {
    "input_text", "output_text", "input_image", "input_video", "input_file",
    "image", "thinking", "redacted_thinking", "tool_reference", "tool_use", "tool_result", "base64", "url",
}  # fmt: skip
_UNIONS = ("content", "source")  # fields of several shapes


def _path(loc: tuple[str | int, ...]) -> str:
    """Writes a location as `messages[0].content[1].image_url.url`, without the names that pydantic gives to a
    union's branches."""
    path = ""
    for i, step in enumerate(loc):
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        is_type = "[" in step or "-" in step or step[:1] == "<"
        is_branch = step in _BRANCHES and i > 0 and (loc[i - 1] in _UNIONS or isinstance(loc[i - 1], int))
        if not is_type and not is_branch:
            path += f".{step}" if path else step
    return path[:200]
