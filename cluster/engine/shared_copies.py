"""The requests that need an item's embeddings, and the copies of them that they share.

All requests in work that show an item share one copy, unless other items wait for room after it: these would
wait for the new request. Such a request gets a copy of its own. A consumer does not want its copy while its
door expects the item's tokens in the prefix cache. A copy ends when its last consumer has left.

Used under the lock of `FeatureStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cluster.types.media_phase import MediaPhase, next_phase
from cluster.types.messages import FeatureGranted, FeatureShared

ItemKey = tuple[str, int]  # request id, item index
CopyName = tuple[str, int]  # media hash, number of rows
Tell = Callable[[FeatureGranted | FeatureShared], None]


@dataclass(frozen=True)
class Consumer:
    key: ItemKey
    ttl_s: float  # of a grant that is made for it
    tell: Tell  # reports to the door that asked
    # An encoder of this process brings the item: called when there is room
    on_room: Callable[[], None] | None
    is_wanted: bool = True  # False: the item's tokens are expected in the prefix cache


@dataclass(eq=False)
class FeatureCopy:
    """One copy of an item's embeddings, for all its consumers."""

    name: CopyName
    consumers: dict[ItemKey, Consumer] = field(default_factory=dict)  # in order of arrival
    block_ids: list[int] = field(default_factory=list)
    lease_id: str = ""  # while a lease is open
    # The consumer for which the room was granted; it may have left. None: no encoder was asked yet
    owner: ItemKey | None = None
    phase: MediaPhase = MediaPhase.QUEUED

    @property
    def is_brought(self) -> bool:
        """An encoder was asked for it, or will be as soon as there is room."""
        return self.owner is not None or any(each.is_wanted for each in self.consumers.values())

    @property
    def first_wanting(self) -> Consumer | None:
        return next((each for each in self.consumers.values() if each.is_wanted), None)

    def move(self, phase: MediaPhase) -> None:
        self.phase = next_phase(self.name[0], self.phase, phase)

    def get_room(self, block_ids: Iterable[int]) -> None:
        """It has this room, which no encoder was asked to fill yet."""
        self.move(MediaPhase.STAGING)
        self.block_ids, self.owner, self.lease_id = list(block_ids), None, ""

    def be_owned(self, owner: ItemKey, lease_id: str = "") -> None:
        """The encoder of this consumer fills the room, under the lease, or in this process."""
        self.owner, self.lease_id = owner, lease_id

    def end_lease(self) -> None:
        self.lease_id = ""

    def want(self, key: ItemKey) -> None:
        self.consumers[key] = replace(self.consumers[key], is_wanted=True)

    def encode_elsewhere(self, key: ItemKey) -> None:
        """No encoder of this process brings it for this consumer."""
        self.consumers[key] = replace(self.consumers[key], on_room=None)


class SharedCopies(Mapping[ItemKey, FeatureCopy]):
    """Copies are found by the items of requests that consume them."""

    def __init__(self) -> None:
        self._copies: dict[ItemKey, FeatureCopy] = {}
        # Copies that have consumers, oldest first.
        self._by_name: dict[CopyName, list[FeatureCopy]] = {}
        # By request in work: blocks whose rows its KV was computed from.
        self._merged: dict[str, set[int]] = {}

    def __getitem__(self, key: ItemKey) -> FeatureCopy:
        return self._copies[key]

    def __iter__(self) -> Iterator[ItemKey]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    def newest(self, name: CopyName) -> FeatureCopy | None:
        copies = self._by_name.get(name)
        return copies[-1] if copies else None

    def join(self, copy: FeatureCopy, consumer: Consumer) -> None:
        """`copy`: of this item, or a new one."""
        if not copy.consumers:
            self._by_name.setdefault(copy.name, []).append(copy)
        copy.consumers[consumer.key] = consumer
        self._copies[consumer.key] = copy

    def leave(self, key: ItemKey, *, has_ended: bool) -> FeatureCopy | None:
        """The copy that the consumer had. `has_ended`: its request is over. May be repeated."""
        if has_ended:
            self._merged.pop(key[0], None)
        copy = self._copies.pop(key, None)
        if copy is None:
            return None
        if not has_ended and copy.phase is MediaPhase.STAGED:
            self._merged.setdefault(key[0], set()).update(copy.block_ids)
        del copy.consumers[key]
        if not copy.consumers:
            copies = self._by_name[copy.name]
            copies.remove(copy)
            if not copies:
                del self._by_name[copy.name]
        return copy

    def ready_items(self, request_id: str, num_items: int) -> set[int]:
        """Items of the request whose rows are here."""
        copies = ((item_idx, self.get((request_id, item_idx))) for item_idx in range(num_items))
        return {idx for idx, copy in copies if copy is not None and copy.phase is MediaPhase.STAGED}

    def harmed_by(self, block_ids: Iterable[int]) -> set[str]:
        """Requests that have, or have had, their embeddings in these blocks."""
        blocks = set(block_ids)
        have = {name for (name, _), copy in self.items() if not blocks.isdisjoint(copy.block_ids)}
        return have | {name for name, merged in self._merged.items() if not blocks.isdisjoint(merged)}
