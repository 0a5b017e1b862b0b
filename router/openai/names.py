"""Errors about a chat request that another endpoint has made, in that endpoint's own names. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from cluster.errors import RequestError

Result = TypeVar("Result")


def renamed(error: RequestError, name_of: Callable[[str], str]) -> RequestError:
    """`name_of`: from a chat request's field to the endpoint's own."""
    if error.param is None:
        return error
    name = name_of(error.param)
    return type(error)(error.message.replace(error.param, name), param=name)


async def with_names(work: Awaitable[Result], name_of: Callable[[str], str]) -> Result:
    """Renames what the door refuses, too."""
    try:
        return await work
    except RequestError as error:
        raise renamed(error, name_of) from error
