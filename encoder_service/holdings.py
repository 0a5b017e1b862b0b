"""How much is held, by name: a sum that is zero again when everybody has given back what he had."""

from __future__ import annotations


class Holdings:
    """Bytes or rows; the owner says which."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def hold(self, name: str, amount: int) -> None:
        """`name` holds so much from now on, whatever it held before."""
        self._total += amount - self._held.get(name, 0)
        self._held[name] = amount

    def release(self, name: str) -> None:
        """Names that hold nothing are ignored."""
        self._total -= self._held.pop(name, 0)
