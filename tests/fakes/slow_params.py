"""Parameters of which some values are tested in every run, and all of them in the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All `values`; those that are not in `kept` are marked slow. A tuple is the values of several names."""
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
