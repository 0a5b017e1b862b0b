"""Which requests want which item, and what is being sent. Owned by the engine's thread.

A delivery is added. It gets its target and its rows, in either order, and is sent. Its rows stay pinned in
the cache until the transfer has ended, even if the delivery has ended before.

If the worker computes prompts, too, rows of its own prompts are not sent: they are copied into the room that
its language engine has reserved (`OwnEmbeddings`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cluster.clock import Clock
from cluster.errors import ClusterError, UnavailableError, to_info
from cluster.types.media import MediaItem
from cluster.types.messages import Encoded, Failed
from cluster.types.transfer import FeaturesReady, ReceivedGrant
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from encoder_service.cache import EmbeddingCache
from encoder_service.state import Delivery, Holdings
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Finished, SendEvent
from kv_transfer.lease.transfer_engine import TransferEngine

if TYPE_CHECKING:
    from cluster.engine.inbox import OwnEmbeddings

logger = logging.getLogger(__name__)


@dataclass
class _SharedFile:
    item: MediaItem  # one copy of the file for all deliveries
    num_deliveries: int = 0


class Deliveries:
    def __init__(
        self,
        cache: EmbeddingCache,
        transfer_engine: TransferEngine,
        outbox: Outbox,
        clock: Clock,
        own_prompts: OwnEmbeddings | None,
    ):
        self._own_prompts = own_prompts
        self._cache = cache
        self._transfer_engine = transfer_engine
        self._outbox = outbox
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._deliveries: dict[str, Delivery] = {}
        self._files: dict[str, _SharedFile] = {}  # by media hash
        self._by_lease: dict[str, Delivery] = {}  # deliveries that are being sent; each pins its cache entry
        self._file_bytes = Holdings()  # by media hash
        self._sending_bytes = Holdings()  # by lease

    def __len__(self) -> int:
        return len(self._deliveries)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self._deliveries.values())

    @property
    def num_sending(self) -> int:
        return len(self._by_lease)

    @property
    def file_bytes(self) -> int:
        return self._file_bytes.total

    @property
    def sending_bytes(self) -> int:
        return self._sending_bytes.total

    def get(self, key: str) -> Delivery | None:
        return self._deliveries.get(key)

    def sent_by(self, lease_id: str) -> Delivery | None:
        """The delivery whose rows this lease carries. None: a lease of no delivery."""
        return self._by_lease.get(lease_id)

    def of_request(self, request_id: str) -> list[Delivery]:
        return [delivery for delivery in self if delivery.request_id == request_id]

    def of_door(self, door: DoorId) -> list[Delivery]:
        return [delivery for delivery in self if delivery.door == door]

    def expired(self) -> Iterator[Delivery]:
        """Deliveries whose time is over, each once."""
        for key in self._deadlines.expired():
            if key in self._deliveries:
                yield self._deliveries[key]

    def wait_s(self) -> float | None:
        """Seconds until the next deadline. None: there is none."""
        return self._deadlines.wait_s()

    def add(self, delivery: Delivery, timeout_s: float) -> None:
        wanted = self._files.setdefault(delivery.media_hash, _SharedFile(delivery.item))
        wanted.num_deliveries += 1
        delivery.item = wanted.item
        self._file_bytes.hold(delivery.media_hash, len(wanted.item.data))
        if delivery.keep:
            self._cache.keep(delivery.media_hash)
        self._deliveries[delivery.key] = delivery
        self._deadlines.add(delivery.key, timeout_s)

    def send(self, delivery: Delivery) -> None:
        """The rows are in the cache: they go to where they are wanted, if that is known."""
        if delivery.target is not None:
            self._write(delivery, delivery.target)
        elif self._own_prompts is not None:
            sent_at, rows = self._clock.now(), partial(self._cache.blocks, delivery.media_hash)
            if self._own_prompts.deposit(delivery.request_id, delivery.item_idx, rows):
                delivery.sent_at = sent_at
                self._complete(delivery, self._clock.now())

    def _write(self, delivery: Delivery, target: ReceivedGrant) -> None:
        delivery.sent_at = self._clock.now()
        try:
            delivery.outgoing = self._transfer_engine.open(target)
            block_ids = self._cache.pin(delivery.media_hash)
            lease_id = target.grant.lease_id
            self._by_lease[lease_id] = delivery
            self._sending_bytes.hold(lease_id, self._cache.num_bytes(delivery.media_hash))
            delivery.outgoing.write(block_ids, range(len(block_ids)))
            delivery.outgoing.finish(msgspec.msgpack.encode(FeaturesReady(delivery.media_hash)))
        except TransferError as error:
            self.fail(delivery, UnavailableError(f"cannot write to the prefill worker: {error}"))

    def on_transfer(self, event: SendEvent, at: float) -> None:
        """A push that `sent_by` knows has ended. Called once for each push."""
        delivery = self._by_lease.pop(event.lease_id)
        self._sending_bytes.release(event.lease_id)
        self._cache.unpin(delivery.media_hash)
        if self._deliveries.get(delivery.key) is not delivery:
            return
        if isinstance(event, Finished):
            self._complete(delivery, at)
        else:
            self.fail(delivery, UnavailableError(f"embeddings could not be sent to prefill: {event}"))

    def _complete(self, delivery: Delivery, at: float) -> None:
        encoded = Encoded(delivery.request_id, delivery.item_idx, delivery.from_cache, delivery.timing(at))
        self._outbox.send(delivery.door, encoded)
        self._forget(delivery)

    def fail(self, delivery: Delivery, error: ClusterError) -> None:
        self._outbox.send(delivery.door, Failed(delivery.request_id, to_info(error), delivery.item_idx))
        self.end(delivery, error.message)

    def end(self, delivery: Delivery, reason: str) -> None:
        """The delivery is not wanted any more. A delivery that has ended is ignored."""
        if self._deliveries.get(delivery.key) is not delivery:
            return
        self._forget(delivery)
        if delivery.outgoing is not None:
            delivery.outgoing.abort(reason)
        elif delivery.target is not None:
            self.return_grant(delivery.target, reason)
        elif self._own_prompts is not None:
            self._own_prompts.give_up(delivery.request_id, delivery.item_idx)

    def return_grant(self, target: ReceivedGrant, reason: str) -> None:
        """Returns a grant that will not be used."""
        try:
            self._transfer_engine.open(target).abort(reason)
        except Exception as error:
            logger.info("lease %s is left to expire: %s", target.grant.lease_id, error)

    def _forget(self, delivery: Delivery) -> None:
        media_hash = delivery.media_hash
        del self._deliveries[delivery.key]
        self._files[media_hash].num_deliveries -= 1
        if self._files[media_hash].num_deliveries == 0:
            del self._files[media_hash]
            self._file_bytes.release(media_hash)
