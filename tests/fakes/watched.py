"""Says whether anything still holds what a test has handed over."""

from __future__ import annotations

import weakref


class WatchedName(str):
    """A name that can be referred to weakly, which a plain str cannot."""


class Watch:
    """Makes names, and knows which of them are held. The test must hold none itself."""

    def __init__(self) -> None:
        self._names: list[weakref.ref[WatchedName]] = []

    def name(self, text: str) -> str:
        made = WatchedName(text)
        self._names.append(weakref.ref(made))
        return made

    @property
    def held(self) -> list[str]:
        return [str(name) for reference in self._names if (name := reference()) is not None]
