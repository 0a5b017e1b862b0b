"""The encoder engine: owns every media item in work. `preparation` holds the items whose tensors are being
made, `deliveries` the requests that want items, `cache` the rows.

A step: one encoder call with the most urgent ready items; their rows go into the cache and to every request
that has named a target; the doors get a message. Preparation runs in a thread pool and overlaps the work of
the device. A long item takes several steps. With no item in work, a step may record a form of call.

A call that fails:
* It ran out of memory: the next step has a smaller budget and tries less at once.
* Any other error: the items of the call run alone from then on, and an item that fails alone has failed.

Outside the calls, an exception that one item or delivery causes ends that one only (`Blame`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from cluster import overload
from cluster.clock import Clock
from cluster.errors import ClusterError, MediaError, OverloadedError, UnavailableError, to_info
from cluster.lost_device import is_device_lost
from cluster.model.failures import is_out_of_memory
from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key
from cluster.types.media import MediaItem
from cluster.types.media_phase import MediaPhase
from cluster.types.messages import CacheChanged, EncodeTotals, Failed, LoadReport, StartEncode
from cluster.types.transfer import ReceivedGrant
from cluster.worker.blame import Blame, bookkeeping
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.speed import SpeedReporter
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import CallBudget, CallPart, CallPlanner, EncoderFits, EncoderLimits
from encoder_service.deliveries import Deliveries
from encoder_service.preparation import IsWanted, NotWantedError, Preparation, PreparationLimits
from encoder_service.runner import EncoderRunner, Prepared, named
from encoder_service.state import Delivery, EncodeItem, Holdings, delivery_key
from kv_transfer.lease.events import SendEvent
from kv_transfer.lease.transfer_engine import TransferEngine

if TYPE_CHECKING:
    from cluster.engine.inbox import OwnEmbeddings

logger = logging.getLogger(__name__)

EXCLUSIVE_S = 0.25  # enough for an image or two; a call with a long video yields between blocks
MAX_RETRY_AFTER_S = 60.0


class EncoderEngine:
    def __init__(
        self,
        *,
        runner: EncoderRunner,
        cache: EmbeddingCache,
        transfer_engine: TransferEngine,
        outbox: Outbox,
        clock: Clock,
        executor: Executor,
        limits: EncoderLimits,
        policy: SchedulingPolicy,
        cpu_slots: CpuSlots,
        own_prompts: OwnEmbeddings | None = None,
    ):
        """`own_prompts`: of a worker that computes prompts, too."""
        self.runner = runner
        self._cache = cache
        self._transfer_engine = transfer_engine
        self._outbox = outbox
        self._clock = clock
        self._limits = limits
        self._policy = policy
        self._cpu_slots = cpu_slots
        self._loop: StepLoop | None = None
        self.items: dict[str, EncodeItem] = {}  # those in work, by media hash; others only read it
        # By media hash: embedding rows, before pooling, that are still to be computed.
        self._queued_rows = Holdings()
        self.deliveries = Deliveries(cache, transfer_engine, outbox, clock, own_prompts)
        self._totals = EncodeTotals()
        self._budget = CallBudget(limits.max_call_bytes, clock)
        self.fits = EncoderFits(limits.max_batch_rows)
        self.planner = CallPlanner(limits, self._budget, policy, cache, self.fits)
        self._blame_item = Blame(self._fail_named_item)
        self._blame_delivery = Blame(self._fail_named)
        ahead = PreparationLimits(
            limits.num_prepare_threads, limits.max_prepared_bytes, limits.max_piece_rows
        )
        self.preparation = Preparation(self._prepare, executor, ahead, policy, self._on_prepared)
        outbox.greet_with(lambda: CacheChanged((*cache.content(), *self.items), ()))
        self._speed = SpeedReporter(
            outbox,
            clock,
            encode=self.fits.encode,
            prepare=self.fits.prepare,
            max_step_units=limits.max_batch_rows,
            links=lambda: transfer_engine.links,
        )

    def attach(self, loop: StepLoop) -> None:
        """`loop`: where results of the thread pool are handed to the engine's thread. Set once, before the
        first call."""
        self._loop = loop

    def step(self) -> float | None:
        for delivery in self.deliveries.expired():
            self._fail(delivery, UnavailableError("encoding waited too long"))
        batch = self._select()
        self._tell_doors(self.load())  # before the call: other encoders need not encode the new items
        if batch:
            self._encode(batch)
            self._tell_doors()
        return 0 if batch or (not self.items and self.runner.record_next()) else self.deliveries.wait_s()

    def start(self, door: DoorId, message: StartEncode, came_at: float) -> None:
        """If an item of a request is asked for again, what was sent before did not arrive: the new delivery
        replaces the earlier one. `came_at`: when the message arrived."""
        earlier = self.deliveries.get(delivery_key(message.request_id, message.item_idx))
        if earlier is not None:
            self.deliveries.end(earlier, "requested again")
        with Blame(partial(self._fail_start, door, message)).of(message.item.media_hash):
            self._start(door, message, came_at)
        if earlier is not None:
            self._detach(earlier)  # only now: an item that the new delivery wants has stayed in work

    def set_target(self, request_id: str, item_idx: int, target: ReceivedGrant | None) -> None:
        """Prefill has made room; None: in this process. If the delivery has ended, the grant is returned at
        once. If it is still to come, it finds the room."""
        if (delivery := self.deliveries.get(delivery_key(request_id, item_idx))) is None:
            return target and self.deliveries.return_grant(target, "the request has ended")
        delivery.target = target
        with self._blame_delivery.of(delivery.key):
            self._serve(delivery)

    def cancel(self, request_id: str, item_idx: int | None = None) -> None:
        """Ends what a request wanted here, or one item of it. An item that no delivery wants any more is not
        encoded further."""
        for delivery in self.deliveries.of_request(request_id):
            if item_idx in (None, delivery.item_idx):
                self._drop(delivery, "cancelled")

    def drop_door(self, door: DoorId) -> None:
        for delivery in self.deliveries.of_door(door):
            self._drop(delivery, "the door is gone")

    def on_transfer(self, event: SendEvent, at: float) -> None:
        """A push has ended at the instant `at`. Called once for each push."""
        if (delivery := self.deliveries.sent_by(event.lease_id)) is not None:  # else a grant returned unused
            with self._blame_delivery.of(delivery.key):
                self.deliveries.on_transfer(event, at)

    def load(self) -> LoadReport:
        return LoadReport(
            num_running=len(self.items),
            num_waiting=len(self.deliveries),
            num_queued_units=self._queued_rows.total,
            num_used_blocks=self._cache.num_held_blocks,
            num_open_leases=self.deliveries.num_sending,
            num_cached_blocks=self._cache.num_cached_blocks,
            sent=self._transfer_engine.sent,
            held_bytes=self.deliveries.file_bytes + self.preparation.held_bytes,
            sending_bytes=self.deliveries.sending_bytes,
            encoded=self._totals,
            is_of_encoder=True,
            busy_s=self._cpu_slots.busy_s,
        )

    def _start(self, door: DoorId, message: StartEncode, came_at: float) -> None:
        item = message.item
        if (error := self._refusal(message)) is not None:
            self._outbox.send(door, Failed(message.request_id, to_info(error), message.item_idx))
            self._cache.note(item.media_hash)  # the door expected the rows here
            return
        arrived_at = came_at - message.waited_s
        num_rows = message.num_rows_before + item.num_call_rows
        ticket = Ticket(item.media_hash, arrived_at, num_rows, priority=message.priority)
        delivery = Delivery(
            door, message.request_id, message.item_idx, item, ticket, message.keep, came_at=came_at
        )
        delivery.from_cache = item.media_hash in self._cache
        self._count(num_cached=int(delivery.from_cache))
        self.deliveries.add(delivery, message.timeout_s)
        self._serve(delivery)

    def _refusal(self, message: StartEncode) -> ClusterError | None:
        """Why an item is not accepted. None: it is accepted."""
        item = message.item
        if item.geometry.num_tokens > self._cache.max_rows:
            return MediaError("the item is larger than the encoder's memory")
        is_new = item.media_hash not in self._cache and item.media_hash not in self.items
        num_rows = self._queued_rows.total + item.num_call_rows
        if is_new and self.items and num_rows > self._limits.max_queued_rows:
            wait_s = min(self._queued_rows.total / self._policy.tokens_per_s, MAX_RETRY_AFTER_S)
            text = overload.encoder_rows(num_rows, self._limits.max_queued_rows)
            return OverloadedError(text, retry_after_s=wait_s)
        return None

    def _serve(self, delivery: Delivery) -> None:
        """Brings one delivery as far as possible: sends its rows, or makes sure that its item is being
        encoded."""
        if delivery.media_hash in self._cache:
            return self.deliveries.send(delivery)
        delivery.from_cache = False  # the rows may have been evicted since `_start`
        item = self.items.get(delivery.media_hash) or self._start_encoding(delivery)
        item.keep |= delivery.keep
        if delivery not in item.deliveries:
            item.deliveries.append(delivery)
            delivery.timestamps = item.timestamps
            self._reorder(item)

    @bookkeeping
    def _start_encoding(self, delivery: Delivery) -> EncodeItem:
        """Takes an item into work that no other delivery wants at present."""
        item = EncodeItem(delivery.item, delivery.ticket, deliveries=[delivery])
        delivery.timestamps = item.timestamps
        self.items[item.media_hash] = item
        self._cache.note(item.media_hash)
        self._queued_rows.hold(item.media_hash, item.num_call_rows)
        self.preparation.put(item.ticket, item.item)
        return item

    def _reorder(self, item: EncodeItem) -> None:
        """An item is as urgent as the most urgent of its deliveries."""
        ticket = min((d.ticket for d in item.deliveries), key=lambda t: order_key(t, self._policy))
        if ticket != item.ticket:
            item.ticket = ticket
            self.preparation.reorder(ticket)

    def _prepare(self, item: MediaItem, is_wanted: IsWanted) -> Prepared:
        """Prepares an item. Runs on a thread of the pool."""
        assert self._loop is not None
        began_at = self._clock.now()
        prepared = self.runner.prepare(item, is_wanted)
        took_s = self._clock.now() - began_at
        self._loop.call(self.fits.prepare[item.modality].observe, item.num_call_rows, 0.0, took_s)
        return prepared

    def _on_prepared(self, media_hash: str, result: Prepared | BaseException) -> None:
        """Passes the result of a preparation to the loop. Runs on a thread of the pool."""
        assert self._loop is not None
        self._loop.call(self._prepared, media_hash, result, self._clock.now())

    def _prepared(self, media_hash: str, result: Prepared | BaseException, at: float) -> None:
        item = self.items[media_hash]  # an item is not removed while a thread prepares it
        item.timestamps.prepared_at = at
        if not item.deliveries:
            self._remove(item, MediaPhase.DISCARDED)
        elif isinstance(result, NotWantedError):
            self.preparation.put(item.ticket, item.item)  # asked for again meanwhile
        elif isinstance(result, BaseException):
            self._fail_item(item, named(result))
        else:
            item.prepared = result
            item.move(MediaPhase.READY)

    def _select(self) -> list[CallPart]:
        """The next encoder call. Room in the cache is reserved for its items."""
        ready = [(item, item.prepared) for item in self.items.values() if item.prepared is not None]
        parts, batch = [], []
        for item, prepared in ready:
            with self._blame_item.of(item.media_hash):
                parts.append(self.planner.part_of(item, prepared))
        for call in self.planner.choose(parts):
            with self._blame_item.of(call.item.media_hash):
                self._reserve_room(call)
                batch.append(call)
        return batch

    def _reserve_room(self, call: CallPart) -> None:
        if call.item.phase is MediaPhase.READY:
            has_room = self._cache.try_reserve(call.item.media_hash, call.item.num_rows)
            assert has_room, "the scheduler gave room that is not there"
            call.item.move(MediaPhase.ENCODING)

    def _encode(self, batch: Sequence[CallPart]) -> None:
        """One encoder call."""
        exclusive_s = EXCLUSIVE_S if batch[0].piece.start == 0 else 0.0  # only for the first piece of an item
        try:
            with self._cpu_slots.acquire(exclusive_s):
                began_at = self._clock.now()
                for call in batch:
                    call.item.timestamps.called_at = call.item.timestamps.called_at or began_at
                modality = batch[0].item.item.modality
                outputs = self.runner.encode(modality, [call.piece for call in batch])
            done = list(zip(batch, outputs, strict=True))
        except Exception as error:  # the model's code may raise anything on unusual input
            if is_device_lost(error):
                raise
            return self._on_failed_call(batch, error)
        num_rows = sum(call.candidate.num_rows for call in batch)
        self.fits.encode[modality].observe(num_rows, 0.0, self._cpu_slots.ran_s)
        for call, rows in done:
            with self._blame_item.of(call.item.media_hash):
                self._store(call, rows)

    def _on_failed_call(self, batch: Sequence[CallPart], error: Exception) -> None:
        """The items stay in work, and the next step tries less at once. An item that cannot be tried with
        less fails."""
        ran_out = is_out_of_memory(error)
        if ran_out:
            num_bytes = sum(call.candidate.num_bytes for call in batch)
            logger.warning("an encoder call of an estimated %d bytes ran out of memory", num_bytes)
            self._budget.lower(num_bytes)
        if len(batch) > 1:
            for call in batch if not ran_out else ():
                call.item.is_suspect = True
            return
        item, piece = batch[0].item, batch[0].piece
        if not ran_out or piece.end - piece.start <= item.item.options.temporal_pooling:
            self._fail_item(item, named(error))

    def _store(self, call: CallPart, rows: torch.Tensor) -> None:
        """Writes the rows of one piece to the room that is reserved for its item."""
        item, start = call.item, call.item.num_rows_done
        end = start + len(rows)
        if end > item.num_rows or (call.piece.is_last and end < item.num_rows):
            # The door has given prefill this number of rows. Another number must not be sent.
            error = MediaError(f"it has {end} embedding rows or more; its header promised {item.num_rows}")
            return self._fail_item(item, error)
        self._cache.write(item.media_hash, start, rows)
        item.num_rows_done, item.num_units_done = end, call.piece.end
        share_left = 1 - call.piece.end / call.piece.prepared.num_units
        self._queued_rows.hold(item.media_hash, int(item.num_call_rows * share_left))
        if call.piece.is_last:
            self._cache.complete(item.media_hash, item.num_rows, keep=item.keep)
            item.timestamps.encoded_at = self._clock.now()
            self._remove(item, MediaPhase.CACHED)
            self._count(num_encoded=1, num_rows=item.num_rows)
            for delivery in item.deliveries:
                with self._blame_delivery.of(delivery.key):
                    self.deliveries.send(delivery)

    def _tell_doors(self, load: LoadReport | None = None) -> None:
        if (changes := self._cache.take_changes(self.items)) is not None:
            self._outbox.broadcast(changes)
        self._speed.report()
        self._outbox.flush(load)

    def _count(self, **more: int) -> None:
        changes = {name: getattr(self._totals, name) + number for name, number in more.items()}
        self._totals = msgspec.structs.replace(self._totals, **changes)

    def _fail_start(self, door: DoorId, message: StartEncode, _: str, error: ClusterError) -> None:
        key = delivery_key(message.request_id, message.item_idx)
        if (delivery := self.deliveries.get(key)) is not None:
            return self._fail(delivery, error)
        self._outbox.send(door, Failed(message.request_id, to_info(error), message.item_idx))

    def _fail_named_item(self, media_hash: str, error: ClusterError) -> None:
        if (item := self.items.get(media_hash)) is not None:
            self._fail_item(item, error)

    def _fail_named(self, key: str, error: ClusterError) -> None:
        if (delivery := self.deliveries.get(key)) is not None:
            self._fail(delivery, error)

    def _fail_item(self, item: EncodeItem, error: ClusterError) -> None:
        self._remove(item, MediaPhase.DISCARDED)
        self._count(num_failed=1)
        for delivery in item.deliveries:
            self.deliveries.fail(delivery, error)

    def _fail(self, delivery: Delivery, error: ClusterError) -> None:
        self.deliveries.fail(delivery, error)
        self._detach(delivery)

    def _drop(self, delivery: Delivery, reason: str) -> None:
        self.deliveries.end(delivery, reason)
        self._detach(delivery)

    @bookkeeping
    def _detach(self, delivery: Delivery) -> None:
        """Removes the delivery from its item. The last delivery takes the item out of work, unless a thread
        is preparing it."""
        if (item := self.items.get(delivery.media_hash)) is None or delivery not in item.deliveries:
            return
        item.deliveries.remove(delivery)
        if item.deliveries:
            self._reorder(item)
        elif item.phase is not MediaPhase.PREPARING or self.preparation.withdraw(item.media_hash):
            self._remove(item, MediaPhase.DISCARDED)

    @bookkeeping
    def _remove(self, item: EncodeItem, phase: MediaPhase) -> None:
        """Takes the item out of work: frees its tensors and, unless it is complete, its room in the cache."""
        item.move(phase)
        item.prepared = None
        del self.items[item.media_hash]
        self._queued_rows.release(item.media_hash)
        self.preparation.release(item.media_hash)
        self._cache.free_reserved(item.media_hash)
        self._cache.note(item.media_hash)
