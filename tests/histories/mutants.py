"""Planted bugs: each must be found by some seed. One entry is one small change of the product.

`python -m tests.histories mutants` prints how many seeds each took. Bugs of doors: `mutants_of_doors.py`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from cluster.engine import answers, kv_output, state
from cluster.engine.ahead import ForwardAhead
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.lifecycle import Lifecycle
from cluster.engine.sequence import TokenSequence
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.kvcache.tier import KvTier
from cluster.model.states import StateSpan
from cluster.rpc import SentLog
from cluster.worker.outbox import Outbox
from cluster.worker.shell import WorkerShell
from encoder_service.deliveries import Deliveries
from encoder_service.engine import EncoderEngine
from kv_transfer.lease import lease_writer
from kv_transfer.lease.receiver import Receiver
from kv_transfer.lease.sender import Sender

Change = tuple[Any, str, Any]  # owner, name, what takes its place


def nothing(*_: Any, **__: Any) -> None:
    pass


# ---------------------------------------------------------------------------------------------------- leases


def fence_removed() -> Change:
    """The blocks of a cancelled lease are free although its writer has not stopped."""
    return Receiver, "cancel", lambda self, lease_id: self.revoke(lease_id, "cancelled")


def generation_not_bumped() -> Change:
    free = BlockPool.free

    def kept(self: BlockPool, block_ids: Any) -> None:
        generations = list(self._generations)
        free(self, block_ids)
        self._generations = generations

    return BlockPool, "free", kept


def lease_time_from_open() -> Change:
    """The writer's time counts from when it begins, not from when the grant came."""
    open_ = Sender.open

    def late(self: Sender, received: Any) -> Any:
        return open_(self, received.grant.received(self._now()))

    return Sender, "open", late


def no_margin() -> Change:
    init = Receiver.__init__

    def without(self: Receiver, agent: Any, memory: Any, clock: Any, margin_s: float, *args: Any) -> None:
        init(self, agent, memory, clock, 0.0, *args)

    return Receiver, "__init__", without


def done_before_the_bytes() -> Change:
    """The writer says that it is done while writes are in flight."""
    settle = lease_writer.LeaseWriter._settle

    def forgets(self: Any) -> None:
        settle(self)
        if self.outgoing.payload is not None:
            self._in_flight = []

    return lease_writer.LeaseWriter, "_settle", forgets


def write_called_off() -> Change:
    """At its deadline a writer forgets what is in flight, frees the sources and says nothing."""
    settle = lease_writer.LeaseWriter._settle

    def forgets(self: Any) -> None:
        if self._in_flight and self._now() >= self.outgoing.expires_at:
            for handle in self._in_flight:
                self._links._agent.pending.remove(handle)
            self._in_flight, self._is_silent = [], True
        settle(self)

    return lease_writer.LeaseWriter, "_settle", forgets


def late_write_ignored() -> Change:
    return Lifecycle, "fail_holders", nothing


def late_embeddings_ignored() -> Change:
    return Lifecycle, "fail_readers", nothing


def late_word_unnoticed() -> Change:
    """The owner does not look who else holds the blocks."""

    def ignored(self: Receiver, peer: str, envelope: Any) -> None:
        self._taken_back.pop(envelope.lease_id, None)

    return Receiver, "_on_word_without_lease", ignored


def dead_writer_waited_for() -> Change:
    """A lease whose writer has ended is never closed."""
    expire = Receiver._expire

    def forgets(self: Receiver) -> None:
        now = self._clock.now()
        self._expiries = [each for each in self._expiries if each[0] > now] or self._expiries
        if self._expiries and self._expiries[0][0] > now:
            expire(self)

    return Receiver, "_expire", forgets


def lost_grants_kept() -> Change:
    """What was lost with a connection is not looked for when there is another one."""
    return SentLog, "take_unread", lambda self, last_read: []


def read_grants_lost() -> Change:
    """A door takes all that it sent over an earlier connection for lost."""
    take_unread = SentLog.take_unread
    return SentLog, "take_unread", lambda self, last_read: take_unread(self, last_read and "")


def former_connection_heard() -> Change:
    """A worker reads on over an earlier connection of a door, after it has said what it has read."""

    def reads_on(self: WorkerShell, door_name: str) -> str | None:
        log = self._logs.get(door_name)
        return None if log is None else log.last_read

    return WorkerShell, "_last_read", reads_on


# --------------------------------------------------------------------------------------------------- engines


def cancel_lost() -> Change:
    return Lifecycle, "cancel", nothing


def door_drop_frees_the_first() -> Change:
    def first(self: LanguageEngine, door: int) -> None:
        for request_id in self.requests.of_door(door)[:1]:
            self.cancel(request_id)

    return LanguageEngine, "drop_door", first


def encoder_keeps_dropped_doors() -> Change:
    return EncoderEngine, "drop_door", nothing


def companion_forgotten() -> Change:
    """A guided choice that ends frees the blocks of its own sequence only."""
    end_choice = Lifecycle.end_choice

    def half(self: Lifecycle, request: Any, choice: Any) -> None:
        choice.sequences = choice.sequences[:1]
        end_choice(self, request, choice)

    return Lifecycle, "end_choice", half


def partial_block_shared() -> Change:
    """The last block of a prompt is not copied for the other choices."""
    return BlockMemory, "copy_blocks", nothing


def preempted_keeps_blocks() -> Change:
    def forgets(self: Lifecycle, request: Any) -> None:
        self.num_preempted += 1
        self.close(request, "preempted")

    return Lifecycle, "preempt", forgets


def stop_token_ignored() -> Change:
    """By the worker that computes the prompt and by the one that generates."""
    return (
        state,
        "finish_reason",
        lambda token_id, num_generated, stop, is_complete=False: (
            state.FinishReason.LENGTH if num_generated >= stop.max_tokens else None
        ),
    )


def registered_too_early() -> Change:
    """A block counts as cached before its last token is computed."""
    register = answers.register_computed

    def early(sequence: Any, blocks: Any) -> None:
        computed, sequence.num_computed_tokens = (
            sequence.num_computed_tokens,
            sequence.num_computed_tokens + 1,
        )
        register(sequence, blocks)
        sequence.num_computed_tokens = computed

    return answers, "register_computed", early


def last_block_not_sent() -> Change:
    """The partly filled block at the end of a prompt does not travel."""
    new_blocks = kv_output._new_blocks

    def short(request: Any, sequence: Any, num_computed: int, block_size: int) -> range:
        found = new_blocks(request, sequence, num_computed, block_size)
        end = sequence.num_prompt_tokens // block_size
        return range(found.start, max(found.start, min(found.stop, end)))

    return kv_output, "_new_blocks", short


def rows_not_released() -> Change:
    """Room for embeddings is kept when a request that shares them ends."""
    release = FeatureStore.release

    def keeps(self: FeatureStore, key: Any, *, has_ended: bool = False) -> None:
        copy = self.copies.get(key)
        if copy is None or len(copy.consumers) < 2:
            release(self, key, has_ended=has_ended)

    return FeatureStore, "release", keeps


def shared_rows_not_granted_again() -> Change:
    """The owner of a shared copy leaves, and no other encoder is asked."""

    def forgets(self: FeatureStore, lease_id: str, *, completed: bool) -> list[Any]:
        copy = self._rooms._by_lease.get(lease_id)
        if copy is not None and not completed:
            completed = bool(copy.consumers)
        return close(self, lease_id, completed=completed)

    close = FeatureStore.close_lease
    return FeatureStore, "close_lease", forgets


def encoder_lost_ignored() -> Change:
    return FeatureStore, "renew", nothing


def pin_kept() -> Change:
    """Embeddings stay pinned after they were sent."""
    on_transfer = Deliveries.on_transfer

    def keeps(self: Deliveries, event: Any, at: float) -> None:
        with patch.object(self._cache, "unpin", nothing):
            on_transfer(self, event, at)

    return Deliveries, "on_transfer", keeps


def unwanted_grant_kept() -> Change:
    """A grant for embeddings that are not wanted any more is left to expire."""
    return Deliveries, "return_grant", nothing


def stale_tier() -> Change:
    """A block is copied to the second tier although it holds something else by now."""
    return KvTier, "_is_there", lambda self, block: True


def forward_ahead_holds_nothing() -> Change:
    """The blocks that a forward in flight writes to are free when its answers have ended."""
    return ForwardAhead, "_hold", nothing


def state_ahead_not_held() -> Change:
    """The states that a forward in flight writes to are free when its answers have ended."""
    hold = ForwardAhead._hold

    def holds(self: ForwardAhead, choices: Any) -> None:
        hold(self, choices)
        states = {block for each in choices for sequence in each.sequences for block in sequence.state}
        self._state.blocks.free([block for block in self._held_next if block in states])
        self._held_next = [block for block in self._held_next if block not in states]

    return ForwardAhead, "_hold", holds


def state_ahead_of_wrong_place() -> Change:
    """The forward ahead begins with the state that the step behind which it is enqueued began with."""

    def begins(self: TokenSequence) -> Any:
        return (StateSpan(1, self.state, self.next_state),) if self.state else ()

    return TokenSequence, "span_ahead", begins


def drafts_in_states() -> Change:
    """The state counts as the one after all tokens of a step, drafts included."""
    return TokenSequence, "verified", TokenSequence.computed


def one_draft_in_states() -> Change:
    """The state counts as the one after the first draft that was right."""
    verified = TokenSequence.verified

    def too_many(self: TokenSequence, num_tokens: int) -> None:
        verified(self, num_tokens)
        self.num_unsettled_tokens = max(0, self.num_unsettled_tokens - 1)

    return TokenSequence, "verified", too_many


def outbox_forgets_doors() -> Change:
    """A door that is gone is still told everything."""
    return Outbox, "remove_door", nothing


ALL = (
    fence_removed, generation_not_bumped, lease_time_from_open, no_margin, done_before_the_bytes,
    write_called_off, late_write_ignored, late_embeddings_ignored, late_word_unnoticed,
    dead_writer_waited_for, lost_grants_kept, read_grants_lost, former_connection_heard,
    cancel_lost, door_drop_frees_the_first, encoder_keeps_dropped_doors, companion_forgotten,
    partial_block_shared, preempted_keeps_blocks, stop_token_ignored, registered_too_early,
    last_block_not_sent, rows_not_released, shared_rows_not_granted_again, encoder_lost_ignored, pin_kept,
    unwanted_grant_kept, stale_tier, forward_ahead_holds_nothing, state_ahead_not_held,
    state_ahead_of_wrong_place, drafts_in_states, one_draft_in_states, outbox_forgets_doors,
)  # fmt: skip
