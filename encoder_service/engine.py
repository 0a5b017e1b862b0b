"""The encoder engine: owns every media item in work, the embedding cache, and what is being sent.

A step: run one batch of whatever is ready, put the rows into the cache, send to whoever has named a target, tell the
doors. Preparing (decoding the file, preprocessing) runs in a thread pool and overlaps the device's work.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor, Future

import msgspec
import torch

from cluster.clock import Clock
from cluster.errors import ClusterError, InternalError, MediaError, UnavailableError, to_info
from cluster.types.messages import Encoded, EncodeTarget, Failed, FeaturesReady, LoadReport, StartEncode
from cluster.types.transfer import Grant
from cluster.worker.deadlines import Deadlines
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.turns import Turns
from encoder_service.cache import EmbeddingCache
from encoder_service.runner import EncoderRunner, check_rows
from encoder_service.scheduler import Candidate, select_batch
from encoder_service.state import Delivery, EncodeItem, ItemPhase, delivery_key
from kv_transfer.agent import TransferError
from kv_transfer.mover import Mover
from kv_transfer.sender import Finished, SendEvent

logger = logging.getLogger(__name__)

PATIENCE_S = 0.25  # an image or two are done by then; a long video gives way between blocks


class EncoderEngine:
    def __init__(
        self,
        runner: EncoderRunner,
        cache: EmbeddingCache,
        mover: Mover,
        outbox: Outbox,
        clock: Clock,
        executor: Executor,
        max_batch_rows: int,
        max_batch_items: int,
        turns: Turns,
    ):
        self._runner = runner
        self._cache = cache
        self._mover = mover
        self._outbox = outbox
        self._deadlines = Deadlines(clock)
        self._executor = executor
        self._max_batch_rows = max_batch_rows
        self._max_batch_items = max_batch_items
        self._turns = turns
        self._loop: StepLoop | None = None
        self._items: dict[str, EncodeItem] = {}  # by media hash, in order of arrival
        self._deliveries: dict[str, Delivery] = {}
        self._sending: dict[str, Delivery] = {}  # by lease id; pins its cache entry

    def attach(self, loop: StepLoop) -> None:
        """Where results of the thread pool come back; set once, before the first call."""
        self._loop = loop

    def step(self) -> float | None:
        for key in self._deadlines.expired():
            self._expire(key)
        batch = self._select()
        if batch:
            self._encode(batch)
        self._outbox.flush(self.load())
        return 0 if batch else self._deadlines.wait_s()

    def start(self, door: DoorId, message: StartEncode) -> None:
        delivery = Delivery(door, message.request_id, message.item_idx, message.item)
        delivery.from_cache = delivery.media_hash in self._cache
        self._deliveries[delivery.key] = delivery
        self._deadlines.add(delivery.key, message.timeout_s)
        self._serve(delivery)

    def set_target(self, message: EncodeTarget) -> None:
        """Prefill has made room. For a delivery that has ended, the right is given back at once."""
        delivery = self._deliveries.get(delivery_key(message.request_id, message.item_idx))
        if delivery is None:
            self._give_back(message.grant, "the request has ended")
            return
        delivery.target = message.grant
        self._serve(delivery)

    def cancel(self, request_id: str, item_idx: int | None = None) -> None:
        """Forget what a request wanted here, or one item of it; what is being encoded for it is finished and cached."""
        for delivery in [d for d in self._deliveries.values() if d.request_id == request_id]:
            if item_idx in (None, delivery.item_idx):
                self._let_go(delivery, "cancelled")

    def drop_door(self, door: DoorId) -> None:
        for delivery in [d for d in self._deliveries.values() if d.door == door]:
            self._let_go(delivery, "the door is gone")

    def on_transfer(self, event: SendEvent) -> None:
        """A push has ended. Exactly once each."""
        delivery = self._sending.pop(event.lease_id, None)
        if delivery is None:
            return  # a right that was given back unused
        self._cache.unpin(delivery.media_hash)
        if self._deliveries.get(delivery.key) is not delivery:
            return
        if isinstance(event, Finished):
            encoded = Encoded(delivery.request_id, delivery.item_idx, delivery.from_cache)
            self._outbox.send(delivery.door, encoded)
            del self._deliveries[delivery.key]
        else:
            self._fail(delivery, UnavailableError(f"embeddings could not be sent to prefill: {event}"))

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._items),
            num_waiting=len(self._deliveries),
            num_queued_units=sum(item.num_rows for item in self._items.values()),
            num_used_blocks=self._cache.num_pinned_blocks,
            num_open_leases=len(self._sending),
            num_cached_blocks=self._cache.num_cached_blocks,
            sent=self._mover.sent,
        )

    def _serve(self, delivery: Delivery) -> None:
        """Bring one delivery as far as it can go: send it, or see to it that its item is being encoded."""
        if delivery.media_hash in self._cache:
            if delivery.target is not None:
                self._send(delivery)
            return
        delivery.from_cache = False  # it may have been evicted since
        item = self._items.get(delivery.media_hash)
        if item is None:
            item = self._items[delivery.media_hash] = EncodeItem(delivery.item)
            self._prepare(item)
        if delivery not in item.deliveries:
            item.deliveries.append(delivery)
        if item.num_rows > self._cache.max_rows:
            self._fail_item(item, MediaError("the item is larger than the encoder's memory"))

    def _prepare(self, item: EncodeItem) -> None:
        def done(future: Future[Mapping[str, torch.Tensor]]) -> None:
            assert self._loop is not None
            self._loop.call(self._prepared, item, future)

        self._executor.submit(self._runner.prepare, item.item).add_done_callback(done)

    def _prepared(self, item: EncodeItem, future: Future[Mapping[str, torch.Tensor]]) -> None:
        if self._items.get(item.item.media_hash) is not item:
            return  # refused while it was being prepared
        error = future.exception()
        if error is not None:
            self._fail_item(item, _named(error))
        elif not item.deliveries:
            del self._items[item.item.media_hash]
        else:
            item.tensors = future.result()
            item.move(ItemPhase.READY)

    def _select(self) -> list[EncodeItem]:
        ready = (
            Candidate(media_hash, item.item.modality, item.num_rows)
            for media_hash, item in self._items.items()
            if item.phase is ItemPhase.READY and self._cache.has_room(item.num_rows)
        )
        batch = select_batch(ready, self._max_batch_rows, self._max_batch_items)
        return [self._items[candidate.media_hash] for candidate in batch]

    def _encode(self, batch: list[EncodeItem]) -> None:
        """One encoder call. If it fails, each item is tried alone, so that a bad one harms no neighbour."""
        try:
            with self._turns.hold(PATIENCE_S):
                outputs = self._runner.encode(batch[0].item.modality, [item.tensors for item in batch])
        except Exception as error:  # the model's code may raise anything on odd input
            if len(batch) > 1:
                for item in batch:
                    self._encode([item])
            else:
                self._fail_item(batch[0], _named(error))
            return
        for item, rows in zip(batch, outputs, strict=True):
            self._store(item, rows)

    def _store(self, item: EncodeItem, rows: torch.Tensor) -> None:
        try:
            check_rows(item.item, rows)
        except MediaError as error:
            return self._fail_item(item, error)
        if not self._cache.try_insert(item.item.media_hash, rows):
            return  # stays READY: runs again when a push has ended
        item.tensors = {}
        item.move(ItemPhase.ENCODED)
        del self._items[item.item.media_hash]
        for delivery in item.deliveries:
            if delivery.target is not None:
                self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        assert delivery.target is not None
        try:
            delivery.outgoing = self._mover.open(delivery.target)
            block_ids = self._cache.pin(delivery.media_hash)
            self._sending[delivery.target.lease_id] = delivery
            delivery.outgoing.write(block_ids, range(len(block_ids)))
            delivery.outgoing.finish(msgspec.msgpack.encode(FeaturesReady(delivery.media_hash)))
        except TransferError as error:
            self._fail(delivery, UnavailableError(f"cannot write to the prefill worker: {error}"))

    def _expire(self, key: str) -> None:
        delivery = self._deliveries.get(key)
        if delivery is not None:
            self._fail(delivery, UnavailableError("encoding waited too long"))

    def _fail_item(self, item: EncodeItem, error: ClusterError) -> None:
        del self._items[item.item.media_hash]
        for delivery in list(item.deliveries):
            self._fail(delivery, error)

    def _fail(self, delivery: Delivery, error: ClusterError) -> None:
        self._outbox.send(delivery.door, Failed(delivery.request_id, to_info(error), delivery.item_idx))
        self._let_go(delivery, error.message)

    def _let_go(self, delivery: Delivery, reason: str) -> None:
        if self._deliveries.get(delivery.key) is delivery:
            del self._deliveries[delivery.key]
        item = self._items.get(delivery.media_hash)
        if item is not None and delivery in item.deliveries:
            item.deliveries.remove(delivery)
            if not item.deliveries and item.phase is ItemPhase.READY:
                del self._items[delivery.media_hash]
        if delivery.outgoing is not None:
            delivery.outgoing.abort(reason)
        elif delivery.target is not None:
            self._give_back(delivery.target, reason)

    def _give_back(self, grant: Grant, reason: str) -> None:
        try:
            self._mover.open(grant).abort(reason)
        except TransferError:
            logger.info("lease %s is left to expire", grant.lease_id)


def _named(error: BaseException) -> ClusterError:
    if isinstance(error, ClusterError):
        return error
    logger.error("encoding failed", exc_info=error)
    return InternalError("the item could not be encoded; see the encoder's log")
