"""Files become the encoder's input on CPU threads, while the device computes earlier items.

The most urgent item goes first (`cluster.scheduling.keys`). The bytes ahead of the device are bounded: what
is being prepared (estimated) and what waits for its call (counted) never exceed `max_bytes`, unless a single
item does. No item overtakes one that waits for these bytes, so a large item is not delayed for ever. There
are two size classes, short and long items; one thread is kept free of long items, so that short items pass
them.

Frames that are being decoded are not in the sum. They are bounded for each item by the media limits, and the
number of threads bounds the items.

    put → a thread prepares the item → `on_done` → release, when the tensors are gone
    put → withdraw (if a thread has the item, it stops soon)

Any thread may call any method, because a free thread takes the next item without waiting for the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from cluster.errors import NotWantedError as NotWantedError
from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key
from cluster.scheduling.queue import WaitingQueue
from cluster.types.media import MediaItem, Modality
from encoder_service.runner import Prepared
from encoder_service.state import Holdings

FIRST_GUESS = 32 << 10  # bytes per row; Qwen2.5-VL needs 18,816

IsWanted = Callable[[], bool]
OnDone = Callable[[str, Prepared | BaseException], None]


@dataclass
class _BytesPerRow:
    """What items of one modality needed so far. The mean is the estimate for the next item."""

    num_rows: int = 1
    num_bytes: int = FIRST_GUESS

    def estimate(self, num_rows: int) -> int:
        return num_rows * self.num_bytes // self.num_rows


@dataclass(frozen=True)
class PreparationLimits:
    num_threads: int
    max_bytes: int  # bytes of tensors ahead of the device
    long_rows: int  # items of more rows than this are long


@dataclass
class _SizeClass:
    queue: WaitingQueue
    max_running: int
    running: set[str] = field(default_factory=set)


class Preparation:
    def __init__(
        self,
        prepare: Callable[[MediaItem, IsWanted], Prepared],
        executor: Executor,
        limits: PreparationLimits,
        policy: SchedulingPolicy,
        on_done: OnDone,
    ):
        """`on_done(media_hash, tensors or error)` is called once for each item that was not withdrawn, on a
        thread of the executor. It must not block."""
        self._prepare = prepare
        self._executor = executor
        self._limits = limits
        self._policy = policy
        self._on_done = on_done
        self._lock = threading.Lock()
        self._waiting: dict[str, MediaItem] = {}
        self._short = _SizeClass(WaitingQueue(policy), limits.num_threads)
        self._long = _SizeClass(WaitingQueue(policy), max(1, limits.num_threads - 1))
        self._unwanted: set[str] = set()  # items that threads prepare and should stop preparing
        self._held = Holdings()
        self._bytes_per_row: dict[Modality, _BytesPerRow] = {}

    def __len__(self) -> int:
        """Items that wait, or that a thread has."""
        return len(self._waiting) + len(self._short.running) + len(self._long.running)

    @property
    def held_bytes(self) -> int:
        return self._held.total

    def put(self, ticket: Ticket, item: MediaItem) -> None:
        """Prepare the item when it is the most urgent one. `ticket.request_id` is its media hash."""
        with self._lock:
            self._waiting[ticket.request_id] = item
            self._class_of(item).queue.push(ticket)
            self._start()

    def reorder(self, ticket: Ticket) -> None:
        """The item is wanted, and its place in the order has changed. If the item does not wait any more, its
        place stays."""
        with self._lock:
            self._unwanted.discard(ticket.request_id)
            item = self._waiting.get(ticket.request_id)
            if item is not None:
                queue = self._class_of(item).queue
                queue.remove(ticket.request_id)
                queue.push(ticket)

    def withdraw(self, media_hash: str) -> bool:
        """Removes an item that waits. False: a thread has the item or had it. If it has, it
        stops with NotWantedError soon, or finishes before."""
        with self._lock:
            item = self._waiting.pop(media_hash, None)
            if item is None:
                if media_hash in self._short.running or media_hash in self._long.running:
                    self._unwanted.add(media_hash)
                return False
            self._class_of(item).queue.remove(media_hash)
            self._start()
            return True

    def release(self, media_hash: str) -> None:
        """The item's tensors are gone."""
        with self._lock:
            self._held.release(media_hash)
            self._start()

    def _class_of(self, item: MediaItem) -> _SizeClass:
        return self._long if item.num_call_rows > self._limits.long_rows else self._short

    def _start(self) -> None:
        """Starts every item that may begin now. Called under the lock."""
        while (size_class := self._next_class()) is not None:
            media_hash = size_class.queue.peek().request_id
            item = self._waiting[media_hash]
            num_bytes = self._estimate(item)
            if self._held.total and self._held.total + num_bytes > self._limits.max_bytes:
                return
            size_class.queue.pop()
            del self._waiting[media_hash]
            size_class.running.add(media_hash)
            self._held.hold(media_hash, num_bytes)
            self._executor.submit(self._run, media_hash, item, size_class)

    def _next_class(self) -> _SizeClass | None:
        """The size class whose first item goes next. None: no thread is free, or no item waits for one."""
        if len(self) - len(self._waiting) >= self._limits.num_threads:
            return None
        open_classes = [
            size_class
            for size_class in (self._short, self._long)
            if size_class.queue and len(size_class.running) < size_class.max_running
        ]
        return min(
            open_classes,
            key=lambda size_class: order_key(size_class.queue.peek(), self._policy),
            default=None,
        )

    def _run(self, media_hash: str, item: MediaItem, size_class: _SizeClass) -> None:
        """Prepares one item. Runs on a thread of the executor."""
        result: Prepared | BaseException
        try:
            result = self._prepare(item, lambda: media_hash not in self._unwanted)
        except BaseException as error:  # an exception of a codec belongs to the item
            result = error
        with self._lock:
            size_class.running.remove(media_hash)
            self._unwanted.discard(media_hash)
            if isinstance(result, Prepared):
                self._held.hold(media_hash, result.num_bytes)
                seen = self._bytes_per_row.setdefault(item.modality, _BytesPerRow(0, 0))
                seen.num_rows += item.num_call_rows
                seen.num_bytes += result.num_bytes
            else:
                self._held.release(media_hash)
            self._start()
        self._on_done(media_hash, result)

    def _estimate(self, item: MediaItem) -> int:
        return self._bytes_per_row.get(item.modality, _BytesPerRow()).estimate(item.num_call_rows)
