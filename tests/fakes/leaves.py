"""The leaves of nested tuples, lists and dicts, as an operator's arguments are.

`torch.utils._pytree` does the same for more kinds of containers, and takes longer than most operators of a
tiny model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def leaves(value: Any) -> list[Any]:
    """Returns what is no container, in its order."""
    if not _is_container(value):
        return [value]
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    for each in value.values() if type(value) is dict else value:
        if _is_container(each):
            _collect(each, found)
        else:
            found.append(each)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the same containers with the function's results in place of their leaves."""
    if not _is_container(value):
        return function(value)
    if type(value) is dict:
        return {
            name: mapped(function, each) if _is_container(each) else function(each)
            for name, each in value.items()
        }
    return type(value)([mapped(function, each) if _is_container(each) else function(each) for each in value])


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind in _CONTAINERS or (isinstance(value, tuple) and kind is not torch.Size)


_CONTAINERS = {tuple, list, dict}
