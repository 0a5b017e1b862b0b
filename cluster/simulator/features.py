"""Embeddings at a simulated language worker, or on their way there: as in the real one, one copy for all
requests that show an item at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster.simulator.attempt import Held
from cluster.simulator.worker import GRANT
from cluster.types.messages import AnyMessage, FeatureGranted, FeatureShared, StartDecode, StartPrefill

Consumer = tuple[Held, int]  # and the index of its item


@dataclass(slots=True)
class _Copy:
    """The first consumer's encoder brings it."""

    consumers: list[Consumer] = field(default_factory=list)
    is_here: bool = False


class Features:
    def __init__(self, tell: Callable[[Held, AnyMessage], None]) -> None:
        """`tell`: the door of a consumer."""
        self._tell = tell
        self._copies: dict[str, _Copy] = {}

    def reserve(self, held: Held, start: StartPrefill | StartDecode) -> None:
        """Room for all items but the cached ones. Those that an earlier consumer's encoder brings, or has
        brought, are shared."""
        for idx in range(len(held.attempt.request.media) if held.request.computes else 0):
            if idx not in start.cached:
                self._reserve(held, idx)
                if idx not in start.encodes:
                    self.renew(held, idx)

    def renew(self, held: Held, idx: int) -> None:
        """The item's encoder, or its next one, gets a grant, unless the item is shared."""
        copy = self._copies.get(held.attempt.request.media[idx].media_hash)
        if copy is not None and copy.consumers[0] == (held, idx) and not copy.is_here:
            self._tell(held, FeatureGranted(held.attempt.request_id, idx, GRANT))

    def want(self, held: Held) -> None:
        """Room for the items that are not in the prefix cache after all."""
        for idx, item in enumerate(held.attempt.request.media):
            copy = self._copies.get(item.media_hash)
            is_missing = item.end > held.sequence.num_computed_tokens and idx not in held.sequence.items_ready
            if is_missing and (copy is None or (held, idx) not in copy.consumers):
                self._reserve(held, idx)
                self.renew(held, idx)

    def _reserve(self, held: Held, idx: int) -> None:
        copy = self._copies.setdefault(held.attempt.request.media[idx].media_hash, _Copy())
        copy.consumers.append((held, idx))
        if len(copy.consumers) > 1:
            if copy.is_here:
                held.sequence.items_arrived([idx])
            self._tell(held, FeatureShared(held.attempt.request_id, idx))

    def arrived(self, media_hash: str) -> Iterator[Held]:
        """Its consumers have it now. Returns those that did not have it before."""
        copy = self._copies.get(media_hash, _Copy())
        copy.is_here = True
        for held, idx in copy.consumers:
            if idx not in held.sequence.items_ready:
                held.sequence.items_arrived([idx])
                yield held

    def release(self, held: Held, num_tokens: int) -> None:
        """The items before so many tokens are not needed any more; repeats are ignored. If this consumer's
        encoder was to bring an item and has not, the next consumer's has to bring it."""
        for idx, item in enumerate(held.attempt.request.media if held.request.computes else ()):
            copy = self._copies.get(item.media_hash)
            if copy is None or item.end > num_tokens or (held, idx) not in copy.consumers:
                continue
            was_first = copy.consumers[0] == (held, idx)
            copy.consumers.remove((held, idx))
            if not copy.consumers:
                del self._copies[item.media_hash]
            elif was_first:
                self.renew(*copy.consumers[0])
