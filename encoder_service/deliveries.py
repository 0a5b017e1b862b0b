"""Which requests want which item, and what is being sent. Owned by the engine's thread.

A delivery is added. It gets its target and its rows, in either order, and is sent. Its rows stay pinned in
the cache until the transfer has ended, even if the delivery has ended before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cluster.clock import Clock
from cluster.errors import ClusterError, UnavailableError, to_info
from cluster.types.media import MediaItem
from cluster.types.messages import Encoded, Failed, FeaturesReady
from cluster.types.transfer import ReceivedGrant
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from encoder_service.cache import EmbeddingCache
from encoder_service.holdings import Holdings
from encoder_service.state import Delivery
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Finished, SendEvent
from kv_transfer.lease.transfer_engine import TransferEngine

logger = logging.getLogger(__name__)


@dataclass
class _SharedFile:
    item: MediaItem  # one copy of the file for all deliveries
    num_deliveries: int = 0


class Deliveries:
    def __init__(self, cache: EmbeddingCache, transfer_engine: TransferEngine, outbox: Outbox, clock: Clock):
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
        return [d for d in self._deliveries.values() if d.request_id == request_id]

    def of_door(self, door: DoorId) -> list[Delivery]:
        return [d for d in self._deliveries.values() if d.door == door]

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
        """The rows are in the cache and the target is known."""
        assert delivery.target is not None
        delivery.sent_at = self._clock.now()
        try:
            delivery.outgoing = self._transfer_engine.open(delivery.target)
            block_ids = self._cache.pin(delivery.media_hash)
            lease_id = delivery.target.grant.lease_id
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
            encoded = Encoded(
                delivery.request_id, delivery.item_idx, delivery.from_cache, delivery.timing(at)
            )
            self._outbox.send(delivery.door, encoded)
            self._forget(delivery)
        else:
            self.fail(delivery, UnavailableError(f"embeddings could not be sent to prefill: {event}"))

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
