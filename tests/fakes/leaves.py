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
    found: list[Any] = []
    mapped(found.append, value)
    return found


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the same containers with the function's results in place of their leaves."""
    kind = type(value)
    if kind is dict:
        return {name: mapped(function, each) for name, each in value.items()}
    if kind is list or (isinstance(value, tuple) and kind is not torch.Size):
        return kind([mapped(function, each) for each in value])
    return function(value)
