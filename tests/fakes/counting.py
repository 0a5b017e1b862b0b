"""Counts work, so that a test of what something costs does not need a clock."""

from __future__ import annotations

from typing import Any


class CountedDict(dict[Any, Any]):
    """Counts how often a key is looked up."""

    num_lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)
