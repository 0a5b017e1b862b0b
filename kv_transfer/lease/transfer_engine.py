"""The thread that moves bytes: one agent, its sender and its receiver.

    any thread       grant / cancel / revoke, open, and the outgoing lease's write / finish / abort; return at once
    transfer thread  step(): notifications in, writes out, events to `on_event`. While a write is posted or
                     bytes are summed or coded, every `poll_interval_s`; while a lease is open, less often
                     the longer nothing happens (`pause_s`); while the last word of a writer is missing, every
                     LATE_POLL_INTERVAL_S; else asleep

A step may copy megabytes (NIXL on one host copies inside the call); granting never waits for it. It never
waits for a device: what a GPU computes is looked at in a later step. After the last lease has closed the
thread polls for another `linger_s`, less and less often, because a notification that was just sent may need
the transport's progress to get out: the first one to a peer waits for its answer.
`on_event` runs on the transfer thread and should only put the event into the owner's inbox.

An unexpected error in a step is logged and reaches the owner as `TransferEngineFailed`. The next step tries
again, so that leases still expire.

For tests on a virtual clock: do not `start`, call `step` by hand.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory
from cluster.pulse import Pulse
from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, ReceivedGrant, ReceivedTotals, SentTotals
from kv_transfer.agents.agent import Agent, TransferError
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import TransferEngineFailed, TransferEvent
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.processes import has_ended
from kv_transfer.lease.receiver import Receiver
from kv_transfer.lease.sender import Sender

logger = logging.getLogger(__name__)

# While nothing is open, but the writer of a lease that was taken back has not said that it stopped.
LATE_POLL_INTERVAL_S = 0.05
# Each poll interrupts a compute thread where cores are few. So a lease that has waited long, for a prompt
# that is being computed, waits for its next poll up to this share longer, and never longer than
# MAX_POLL_INTERVAL_S.
POLL_SHARE = 1 / 64
MAX_POLL_INTERVAL_S = 0.01
# Only leases to write to are open, and nothing is to be written: each call that changes this wakes the
# thread.
WRITER_POLL_INTERVAL_S = 0.02


class TransferEngine:
    def __init__(
        self,
        agent: Agent,
        clock: Clock,
        on_event: Callable[[TransferEvent], None],
        *,
        outgoing: BlockMemory | None = None,
        incoming: BlockMemory | None = None,
        margin_s: float = 5.0,
        poll_interval_s: float = 0.001,
        linger_s: float = 5.0,
        model: str = "",
        outgoing_wire: Wire | None = None,
        incoming_wire: Wire | None = None,
        has_ended: Callable[[ProcessId], bool] = has_ended,
    ):
        """Takes the agent over: `close` closes it.

        `outgoing`: the memory that is sent from. `incoming`: the memory that peers may write to; the two may
        be the same. `outgoing_wire`, `incoming_wire`: for coded KV of that memory; None: all bytes travel
        raw. `margin_s`: see `Receiver`. `model`: fingerprint of the model that the bytes belong to; peers
        with another one are refused.
        """
        self.agent = agent
        self.pulse = Pulse(clock)  # of the transfer thread, while anything is open
        self._clock = clock
        self._on_event = on_event
        self._poll_interval_s = poll_interval_s
        self._linger_s = linger_s
        self._memory = outgoing or incoming
        self._sender = None
        if outgoing is not None:
            self._sender = Sender(agent, outgoing, clock, self._wake, model, outgoing_wire)
        self._receiver = None
        if incoming is not None:
            self._receiver = Receiver(agent, incoming, clock, margin_s, model, incoming_wire, has_ended)
        self._condition = threading.Condition()
        self._is_awake = False  # there is something new to do
        self._is_closing = False
        self._is_failing = False  # the last step raised
        self._linger_until = 0.0
        self._moved_at = clock.now()  # the last call that wakes the thread, or the last event
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Leases, in both directions, whose event has not been delivered."""
        num_incoming = 0 if self._receiver is None else self._receiver.num_open
        return num_incoming + (0 if self._sender is None else self._sender.num_open)

    @property
    def sent(self) -> SentTotals:
        """What was sent since the engine was made."""
        return SentTotals() if self._sender is None else self._sender.sent

    @property
    def received(self) -> ReceivedTotals:
        """What was received since the engine was made."""
        return ReceivedTotals() if self._receiver is None else self._receiver.totals

    @property
    def links(self) -> dict[str, Link]:
        """`Sender.links`."""
        return {} if self._sender is None else self._sender.links

    @property
    def codecs(self) -> dict[str, CodecSpeed]:
        """The codecs, besides raw, in which KV can be sent or received here."""
        if self._sender is not None and (wire := self._sender.wire) is not None:
            return {wire.codec.name: wire.encoding}
        if self._receiver is not None and (wire := self._receiver.wire) is not None:
            return {wire.codec.name: wire.decoding}
        return {}

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
        first_blocks: Sequence[int] = (),
    ) -> Grant:
        """`Receiver.grant`."""
        grant = self._incoming().grant(lease_id, block_ids, generations, ttl_s, run_lengths, first_blocks)
        self._wake()
        return grant

    def cancel(self, lease_id: str) -> None:
        """`Receiver.cancel`."""
        self._incoming().cancel(lease_id)

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """`Receiver.note_writer`."""
        self._incoming().note_writer(lease_id, processes)

    def revoke(self, lease_id: str, reason: str) -> None:
        """`Receiver.revoke`."""
        self._incoming().revoke(lease_id, reason)
        self._wake()

    def open(self, received: ReceivedGrant) -> Outgoing:
        """`Sender.open`."""
        if self._is_closing:
            raise TransferError("this worker is shutting down")
        if self._sender is None:
            raise ValueError("this transfer engine was made without an outgoing memory")
        return self._sender.open(received)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"transfer-{self.agent.name}", daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """One round. True: call it again soon."""
        has_moved, was_open = False, self.num_open > 0
        try:
            has_moved = self._step_in()
            if self._sender is not None:
                for event in self._sender.poll():
                    self._step_in()  # what the owner gets leaves now: only this drives the transport
                    self._deliver([event])
            self._is_failing = False
        except Exception as error:  # the thread's edge: the owner is notified, the thread lives on
            if not self._is_failing:
                logger.exception("a transfer step failed")
                self._deliver([TransferEngineFailed(error)])
            self._is_failing, has_moved = True, False
        now = self._clock.now()
        self.pulse.is_failing = not has_moved
        if was_open or self.num_open:
            self._linger_until = now + self._linger_s
        if self.num_open:
            self.pulse.beat() if has_moved else self.pulse.begin()
        else:
            self.pulse.rest()
        return now < self._linger_until

    def close(self, deadline_s: float = 5.0) -> None:
        """Abort what is being sent, wait up to `deadline_s` for all leases to end, then close the agent. May
        be repeated.

        A lease that has not ended by then ends with an event that says so.
        """
        with self._condition:
            if self._is_closing:
                return
            self._is_closing = True
        if self._sender is not None:
            self._sender.abort_all("this worker is shutting down")
        self._wake()
        deadline = time.monotonic() + deadline_s
        while (self._thread is not None or self.step()) and self.num_open and time.monotonic() < deadline:
            time.sleep(self._poll_interval_s)
        self._stop_thread()
        self._end_leases()
        self.agent.close()

    def _step_in(self) -> bool:
        """Whether the transport answers."""
        if self._receiver is not None:
            self._deliver(self._receiver.poll())
            return self._receiver.failure is None
        try:
            self.agent.notifications()  # none will come; the call drives the transport
        except TransferError as error:
            if not self.pulse.is_failing:
                logger.warning("notifications could not be read: %s", error)
            return False
        return True

    def _run(self) -> None:
        if self._memory is not None:
            self._memory.use_own_stream(priority=-1)
        while True:
            with self._condition:
                is_over, self._is_awake = self._thread is None, False
            if is_over:
                return self._let_device_end()
            is_busy = self.step()
            with self._condition:
                if not self._is_awake and self._thread is not None:
                    self._condition.wait(self.pause_s() if is_busy else self.idle_s)

    def _let_device_end(self) -> None:
        """Nothing that this thread has enqueued reads or writes blocks after it has ended."""
        if self._memory is not None:
            with suppress(RuntimeError):  # the device is lost
                self._memory.synchronize()

    def pause_s(self) -> float:
        """How long the thread sleeps between two steps, unless it is woken."""
        if self._receiver is not None and self._receiver.is_settling:
            return self._poll_interval_s
        if self._sender is not None and self._sender.num_open:
            if self._sender.is_writing:
                return self._poll_interval_s
            if self._receiver is None or not self._receiver.num_open:
                return WRITER_POLL_INTERVAL_S
        quiet_s = self._clock.now() - self._moved_at
        return max(self._poll_interval_s, min(POLL_SHARE * quiet_s, MAX_POLL_INTERVAL_S))

    @property
    def idle_s(self) -> float | None:
        """How long the thread sleeps while nothing is open; None: until it is woken."""
        waits = self._receiver is not None and self._receiver.is_waiting_for_late_words
        return LATE_POLL_INTERVAL_S if waits else None

    def _stop_thread(self) -> None:
        with self._condition:
            thread, self._thread = self._thread, None
            self._condition.notify_all()
        if thread is not None:
            thread.join(timeout=5.0)
            if thread.is_alive():
                logger.error("the transfer thread hangs in the transport and is abandoned")

    def _end_leases(self) -> None:
        error = TransferError("this worker has shut down")
        if self._receiver is not None:
            self._receiver.revoke_all(error.message)
            self._deliver(self._receiver.poll())
        if self._sender is not None:
            self._deliver(self._sender.fail_all(error))

    def _deliver(self, events: Iterable[TransferEvent]) -> None:
        for event in events:
            self._moved_at = self._clock.now()
            try:
                self._on_event(event)
            except Exception:  # a bug of the owner must not cost the other leases their events
                logger.exception("the owner of the transfers failed on %r", event)

    def _incoming(self) -> Receiver:
        if self._receiver is None:
            raise ValueError("this transfer engine was made without an incoming memory")
        return self._receiver

    def _wake(self) -> None:
        self.pulse.begin()
        self._moved_at = self._clock.now()
        with self._condition:
            self._is_awake = True
            self._condition.notify_all()
