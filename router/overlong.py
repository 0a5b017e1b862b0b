"""Prompts and answers that are longer than the model's context, in the words by which clients recognise it.

Agents shorten their conversation, or ask for fewer tokens, if a refusal says so in the API's own words.
OpenAI's begin with "This model's maximum context length is"; at /v1/messages they are `of_messages`. Pure.
"""

from __future__ import annotations

from cluster.errors import ContextLengthError


class OverlongError(ContextLengthError):
    def __init__(self, message: str, *, param: str | None = None, of_messages: str = ""):
        """`of_messages`: the text in the words of Anthropic's API."""
        super().__init__(message, param=param)
        self.of_messages = of_messages


def too_long_prompt(num_tokens: int, max_model_len: int, *, param: str) -> OverlongError:
    """There must be room for one token of the answer, too."""
    return OverlongError(
        f"{_beginning(max_model_len)} the prompt has {num_tokens} tokens, and an answer needs at least one",
        param=param,
        of_messages=f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum",
    )


def too_long_list(num_tokens: int, max_model_len: int, *, param: str) -> OverlongError:
    """Token ids that a client sent."""
    return OverlongError(f"{_beginning(max_model_len)} {param} has {num_tokens} tokens", param=param)


def too_long_text(num_chars: int, max_chars: int, max_model_len: int, *, param: str) -> OverlongError:
    """`max_chars`: more of them certainly are more than `max_model_len` tokens."""
    least = max(max_model_len + 1, num_chars * max_model_len // max_chars)
    return OverlongError(
        f"{_beginning(max_model_len)} {param} has {num_chars} characters, which are at least {least} tokens",
        param=param,
        of_messages=f"prompt is too long: {least} tokens > {max_model_len} maximum (at least: the prompt has "
        f"{num_chars} characters)",
    )


def too_long_answer(num_tokens: int, num_wanted: int, max_model_len: int, *, param: str) -> OverlongError:
    """`num_tokens`: of the prompt; `num_wanted`: of the answer, at most."""
    return OverlongError(
        f"{_beginning(max_model_len)} the request has {num_tokens} tokens of prompt and asks for "
        f"{num_wanted} of answer ({param})",
        param=param,
        of_messages=f"input length and `max_tokens` exceed context limit: {num_tokens} + {num_wanted} > "
        f"{max_model_len}",
    )


def too_many_tokens(num_wanted: int, max_model_len: int, *, param: str) -> OverlongError:
    """More than the context has, whatever the prompt is; it has one token at least."""
    return OverlongError(
        f"{_beginning(max_model_len)} {param} is {num_wanted}",
        param=param,
        of_messages=f"input length and `max_tokens` exceed context limit: 1 + {num_wanted} > {max_model_len} "
        "(the input has at least 1 token)",
    )


def _beginning(max_model_len: int) -> str:
    return f"This model's maximum context length is {max_model_len} tokens. However,"
