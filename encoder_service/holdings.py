"""How much each of several holders holds, and the sum. The sum is zero when every holder has released."""

from __future__ import annotations


class Holdings:
    """Amounts of bytes or rows; the owner says which."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def hold(self, name: str, amount: int) -> None:
        """`name` holds this amount from now on, whatever it held before."""
        self._total += amount - self._held.get(name, 0)
        self._held[name] = amount

    def release(self, name: str) -> None:
        """Names that hold nothing are ignored."""
        self._total -= self._held.pop(name, 0)
