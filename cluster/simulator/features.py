"""Embeddings at a simulated prefill worker, or on their way there: as in the real one, one copy for all
requests that show an item at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.simulator.attempt import SimAttempt

Consumer = tuple[SimAttempt, int]  # an attempt and the index of its item


@dataclass(slots=True)
class _Copy:
    """The first consumer's encoder brings it."""

    consumers: list[Consumer] = field(default_factory=list)
    is_here: bool = False


class Features:
    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}

    def reserve(self, attempt: SimAttempt, item_idx: int) -> bool:
        """True: an earlier consumer's encoder brings it, or has brought it."""
        copy = self._copies.setdefault(attempt.request.media[item_idx].media_hash, _Copy())
        copy.consumers.append((attempt, item_idx))
        return len(copy.consumers) > 1

    def is_here(self, media_hash: str) -> bool:
        copy = self._copies.get(media_hash)
        return copy is not None and copy.is_here

    def arrived(self, media_hash: str) -> list[Consumer]:
        """The consumers that have it now."""
        copy = self._copies.get(media_hash)
        if copy is None:
            return []
        copy.is_here = True
        return list(copy.consumers)

    def release(self, attempt: SimAttempt, item_idx: int) -> Consumer | None:
        """This consumer does not need it any more; repeats are ignored. If its encoder was to bring the copy
        and has not, the next consumer is returned: its encoder has to bring it."""
        media_hash = attempt.request.media[item_idx].media_hash
        copy = self._copies.get(media_hash)
        if copy is None or (attempt, item_idx) not in copy.consumers:
            return None
        was_first = copy.consumers[0] == (attempt, item_idx)
        copy.consumers.remove((attempt, item_idx))
        if not copy.consumers:
            del self._copies[media_hash]
            return None
        return copy.consumers[0] if was_first and not copy.is_here else None
