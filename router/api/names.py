"""Errors in the endpoint's own names. Workers, prompt builder and translation name fields of a chat request;
each endpoint has a function from these to its own. Pure."""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Callable, Iterator, Mapping

import msgspec

from cluster.errors import ClusterError
from router.calls import ChatCall

NameOf = Callable[[str], str]


@contextlib.contextmanager
def naming(name_of: NameOf) -> Iterator[None]:
    """Errors that leave the block name the endpoint's field. An error may be of several requests, so another
    one is raised in its place."""
    try:
        yield
    except ClusterError as error:
        name = error.param if error.param is None else name_of(error.param)
        if error.param is None or name == error.param:
            raise
        named = copy.copy(error)
        named.param, named.message = name, error.message.replace(error.param, str(name))
        raise named from error


def renamed(param: str, names: Mapping[str, str]) -> str:
    """Renames the longest beginning of `param` that has another name."""
    known = param
    while known:
        if known in names:
            return names[known] + param[len(known) :]
        known = known[: max(known.rfind("."), known.rfind("["), 0)]
    return param


def with_names(call: ChatCall, names: Mapping[str, str]) -> ChatCall:
    """Renames fields in a call, so that later errors about its media, structure and tools have the endpoint's
    names, too."""
    structure, tools = call.structure, call.tools
    if structure is not None:
        structure = msgspec.structs.replace(structure, param=renamed(structure.param, names))
    if tools is not None:
        functions = tuple(
            msgspec.structs.replace(each, param=renamed(each.param, names)) for each in tools.functions
        )
        tools = msgspec.structs.replace(tools, functions=functions)
    media = tuple(
        msgspec.structs.replace(source, param=renamed(source.param, names)) for source in call.media
    )
    return msgspec.structs.replace(call, media=media, structure=structure, tools=tools)


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
