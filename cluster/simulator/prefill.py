"""A simulated prefill worker: memory, order and steps by the objects that the real one uses; durations by its
curve. As in the real one, a prompt that comes during a step waits for the end of the step: then it can reuse
what the step has computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.chunks import ChunkScheduler, usable_prefix
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.simulator.attempt import SimAttempt
from cluster.simulator.caches import BlockCache
from cluster.simulator.device import Device, SimLink
from cluster.simulator.events import EventLoop
from cluster.simulator.features import Features
from cluster.simulator.hardware import Model
from cluster.simulator.worker import GRANT, ONE_TOKEN, Network, WorkerSpec
from cluster.types.messages import (
    AnyMessage,
    BlocksChanged,
    Cancel,
    DecodeTarget,
    FeatureGranted,
    FeatureShared,
    FinishReason,
    LoadReport,
    PrefillAdmitted,
    PrefillTiming,
    StartPrefill,
    TokenEvent,
    Tokens,
)


class SimPrefill:
    """`is_local`: part of a decode worker, which computes the prompts of its own requests: it keeps nothing
    and reports nothing."""

    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        device: Device,
        network: Network,
        policy: SchedulingPolicy,
        noise: Callable[[], float],
        model: Model,
        is_local: bool = False,
    ):
        self.spec, self.is_waiting, self.is_dead = spec, False, False
        self._loop, self.device, self._network = loop, device, network
        self._policy, self._noise, self._is_local = policy, noise, is_local
        self._kv_bytes, self._num_layers = model.kv_bytes_per_token, model.num_layers
        self._block_size = model.block_size
        self._context = 0.0  # computed tokens that a token of the last step saw, on average
        self.blocks = BlockCache(1 << 40 if is_local else spec.num_blocks)
        self._admission = PromptAdmission(policy, self.blocks.num_blocks)
        self.chunks = ChunkScheduler(policy)
        self.attempts: OrderedDict[str, SimAttempt] = OrderedDict()
        self.coming: dict[
            str, SimAttempt
        ] = {}  # sent here, and not started; for policies that see the workers themselves
        self._asked: list[SimAttempt] = []  # during the step
        self._features = Features()
        self.batch: list[tuple[SimAttempt, int]] = []
        self.num_queued_tokens = 0
        self._sender = SimLink()
        self.slowdown = 1.0

    @property
    def max_step_tokens(self) -> int:
        """Of the next step, if its tokens see as much context as those of the last one."""
        curves, target_s = self.spec.curves, self.spec.step_target_s / self.slowdown
        assert curves.prefill is not None
        token_s = curves.prefill.per_unit_s + curves.prefill.per_pair_s * self._context
        room_s = target_s - curves.prefill.fixed_s
        if token_s * curves.max_step_units <= room_s:
            return curves.max_step_units
        return self._block_size if room_s <= 0 else max(self._block_size, int(room_s / token_s))

    def receive(self, attempt: SimAttempt, message: AnyMessage) -> None:
        """From the attempt's door."""
        if isinstance(message, StartPrefill):
            self.start(attempt)
        elif isinstance(message, DecodeTarget):
            self._granted(attempt)
        elif isinstance(message, Cancel):
            self.cancel(attempt)

    def start(self, attempt: SimAttempt) -> None:
        """Room for its embeddings is reserved at once."""
        attempt.asked_at = self._loop.now
        if not self.is_dead:
            self._reserve_features(attempt)
        if self.batch:
            self._asked.append(attempt)
            return
        self._start(attempt)
        self._admit()
        self.report()

    def _reserve_features(self, attempt: SimAttempt) -> None:
        for i, item in enumerate(attempt.request.media):
            if self._features.reserve(attempt, i):
                attempt.is_missing[i] = not self._features.is_here(item.media_hash)
                self._tell(attempt, FeatureShared(attempt.request_id, i))

    def _release_features(self, attempt: SimAttempt, num_tokens: int) -> None:
        """Of the items before so many tokens."""
        for i, item in enumerate(attempt.request.media):
            heir = self._features.release(attempt, i) if item.end <= num_tokens else None
            if heir is not None:
                other, item_idx = heir
                self._tell(other, FeatureGranted(other.request_id, item_idx, GRANT))

    def _start(self, attempt: SimAttempt) -> None:
        self.coming.pop(attempt.request_id, None)
        if self.is_dead or attempt.is_cancelled:
            return
        attempt.started_at = self._loop.now
        self.attempts[attempt.request_id] = attempt
        self.num_queued_tokens += attempt.num_tokens
        self._admission.push(self.ticket(attempt, attempt.num_tokens))

    def ticket(self, attempt: SimAttempt, num_tokens: int) -> Ticket:
        """The prompt counts as arrived, as at the real worker, `waited_s` before it came here."""
        request = attempt.request
        arrived_at = (attempt.asked_at or self._loop.now) - attempt.waited_s
        return Ticket(attempt.request_id, arrived_at, num_tokens, not request.media, request.priority)

    def item_ready(self, attempt: SimAttempt, item_idx: int) -> None:
        """Its encoder has brought it, for all prompts that share it."""
        if self.is_dead:
            return
        for consumer in self._features.arrived(attempt.request.media[item_idx].media_hash):
            self._item_ready(*consumer)

    def _item_ready(self, attempt: SimAttempt, item_idx: int) -> None:
        if attempt.is_cancelled or not attempt.is_missing[item_idx]:
            return
        attempt.is_missing[item_idx] = False
        if attempt.request_id not in self.chunks:
            return
        self.chunks.set_ready(attempt.request_id, attempt.num_ready)
        if attempt.blocked_at is not None and attempt.num_ready > attempt.num_computed:
            attempt.media_s += self._loop.now - attempt.blocked_at
            attempt.blocked_at = None
        self.device.wake(self)

    def _granted(self, attempt: SimAttempt) -> None:
        """Decode has room: what is computed travels, and from now on each step's part while it is
        computed."""
        if self.is_dead or attempt.is_cancelled:
            return
        attempt.is_granted = True
        if attempt.num_computed > attempt.num_sent:
            self._push(attempt, self._loop.now, 0.0)

    def cancel(self, attempt: SimAttempt) -> None:
        """Frees what the attempt holds here. Repeats, and attempts that are not here, are ignored."""
        attempt.is_cancelled = True
        self._release_features(attempt, attempt.num_tokens)
        if self.attempts.pop(attempt.request_id, None) is None:
            return
        self.num_queued_tokens -= attempt.num_tokens - attempt.num_computed
        self._admission.remove(attempt.request_id)
        self.chunks.remove(attempt.request_id)
        self._release(attempt)
        self._admit()

    def begin(self) -> float | None:
        if self.is_dead:
            return None
        chunks = self.chunks.schedule(self.max_step_tokens)
        if not chunks:
            return None
        self.batch = [(self.attempts[chunk.request_id], chunk.num_scheduled_tokens) for chunk in chunks]
        step = [(attempt.num_computed, count) for attempt, count in self.batch]
        self._context = mean_context(step)
        return self.true_step_s(step) * self._noise()

    def true_step_s(self, batch: list[tuple[int, int]]) -> float:
        """Of a step with so many (computed tokens, tokens to compute) of each prompt, without noise."""
        num_tokens = sum(count for _, count in batch)
        assert self.spec.curves.prefill is not None
        return self.slowdown * self.spec.curves.prefill.seconds(num_tokens, mean_context(batch))

    def finish(self, took_s: float) -> None:
        if self.is_dead:
            return
        batch, self.batch = self.batch, []
        begun_at = self._loop.now - took_s
        for attempt, count in batch:
            if attempt.is_cancelled:
                continue
            attempt.num_computed += count
            attempt.computing_s += took_s
            self.num_queued_tokens -= count
            self._name_blocks(attempt)
            self._release_features(attempt, attempt.num_computed)
            attempt.is_complete = attempt.num_computed == attempt.num_tokens
            if attempt.is_complete:
                self.chunks.remove(attempt.request_id)
            else:
                self.chunks.set_computed(attempt.request_id, attempt.num_computed)
                if attempt.num_ready <= attempt.num_computed:
                    attempt.blocked_at = self._loop.now
            if attempt.is_granted:
                self._push(attempt, begun_at + took_s / self._num_layers, self._loop.now)
            if attempt.is_complete:
                self._first_token(attempt)
        asked, self._asked = self._asked, []
        for attempt in asked:
            self._start(attempt)
        self._admit()
        self.report()
        self.device.wake(self)

    def report(self) -> None:
        """To all doors."""
        if self._is_local:
            return
        load = LoadReport(
            num_running=len(self.chunks),
            num_waiting=len(self.attempts) - len(self.chunks),
            num_queued_units=self.num_queued_tokens,
            num_used_blocks=self.blocks.num_used,
            num_cached_blocks=self.blocks.num_cached,
        )
        messages: list[AnyMessage] = [Tokens((), load)]
        added, evicted = self.blocks.changes.take()
        if added or evicted:
            messages.append(BlocksChanged(added, evicted))
        self._network.tell_doors(self.spec.replica_id, *messages)

    def _admit(self) -> None:
        while any(self._try_admit(ticket) for ticket in self._admission.heads()):
            pass

    def _try_admit(self, ticket: Ticket) -> bool:
        attempt = self.attempts[ticket.request_id]
        num_blocks = -(-attempt.num_tokens // self._block_size)
        if not self._admission.has_share(ticket, num_blocks):
            return False
        hashes = attempt.request.block_hashes
        num_found = 0 if self._is_local else self.blocks.match(hashes)
        num_cached = usable_prefix(num_found * self._block_size, attempt.num_tokens, self._block_size, ())
        shared = list(hashes[: num_cached // self._block_size])
        if not self.blocks.try_take(shared, num_blocks - len(shared)):
            return False
        self._admission.admit(ticket, num_blocks)
        attempt.shared, attempt.num_anonymous, attempt.num_named = (
            shared,
            num_blocks - len(shared),
            len(shared),
        )
        attempt.num_cached = attempt.num_computed = num_cached
        attempt.admitted_at = self._loop.now
        self.num_queued_tokens -= num_cached
        for i, item in enumerate(attempt.request.media):
            if item.end <= num_cached:
                attempt.is_missing[i] = False
        self._release_features(attempt, num_cached)
        self.chunks.add(self.ticket(attempt, attempt.num_tokens - num_cached), attempt.num_tokens)
        self.chunks.set_computed(attempt.request_id, num_cached)
        self.chunks.set_ready(attempt.request_id, attempt.num_ready)
        if attempt.num_ready <= attempt.num_computed:
            attempt.blocked_at = self._loop.now
        if not self._is_local:
            self._tell(attempt, PrefillAdmitted(attempt.request_id))
        self.device.wake(self)
        return True

    def _name_blocks(self, attempt: SimAttempt) -> None:
        """Full blocks that are computed can be reused. A block whose content is here already remains
        anonymous."""
        if self._is_local:
            return
        hashes = attempt.request.block_hashes
        num_full = min(attempt.num_computed // self._block_size, len(hashes))
        for i in range(attempt.num_named, num_full):
            if self.blocks.name(hashes[i]):
                attempt.shared.append(hashes[i])
                attempt.num_anonymous -= 1
        attempt.num_named = max(attempt.num_named, num_full)

    def _push(self, attempt: SimAttempt, ready_at: float, all_ready_at: float) -> None:
        """Computed and not sent: the first layer's share is ready at one instant, the last layer's at
        another."""
        num_bytes = (attempt.num_computed - attempt.num_sent) * self._kv_bytes
        attempt.num_sent = attempt.num_computed
        link = self.spec.link(attempt.decode.spec.replica_id)
        last_layer_s = num_bytes / self._num_layers / link.bytes_per_s
        there_at = self._sender.send(ready_at, num_bytes, link, all_ready_at + last_layer_s)
        if attempt.is_complete:
            self._loop.at(max(there_at, self._loop.now), self._sent, attempt)

    def _sent(self, attempt: SimAttempt) -> None:
        if self.is_dead or attempt.request_id not in self.attempts:
            return
        self._end(attempt)
        attempt.decode.join(attempt)

    def _first_token(self, attempt: SimAttempt) -> None:
        blocks_s = attempt.admitted_at - attempt.started_at
        timing = PrefillTiming(
            blocks_s=blocks_s,
            media_s=attempt.media_s,
            queued_s=max(
                0.0, self._loop.now - attempt.asked_at - blocks_s - attempt.media_s - attempt.computing_s
            ),
            computing_s=attempt.computing_s,
        )
        is_last = attempt.num_output_tokens <= 1
        finish_reason = FinishReason.LENGTH if is_last else None
        event = TokenEvent(attempt.request_id, ONE_TOKEN, finish_reason, attempt.num_cached, timing=timing)
        self._tell(attempt, Tokens((event,)))
        if is_last or self._is_local:
            self._end(attempt)
        if is_last and self._is_local:
            attempt.decode.cancel(attempt)
        elif self._is_local:
            attempt.decode.join(attempt)

    def _end(self, attempt: SimAttempt) -> None:
        """Prefill has nothing more to do for the attempt; cached blocks are kept."""
        del self.attempts[attempt.request_id]
        self._admission.remove(attempt.request_id)
        self._release(attempt)
        self._admit()

    def _tell(self, attempt: SimAttempt, message: AnyMessage) -> None:
        """The attempt's door."""
        self._network.tell(attempt.door.receive, self.spec.replica_id, message)

    def _release(self, attempt: SimAttempt) -> None:
        if self.is_dead:
            return
        self.blocks.free(attempt.shared, attempt.num_anonymous)
        attempt.shared, attempt.num_anonymous = [], 0


def mean_context(batch: list[tuple[int, int]]) -> float:
    """Earlier tokens that a token of a step sees: of (computed tokens, tokens to compute) of each prompt."""
    return sum(computed * count for computed, count in batch) / sum(count for _, count in batch)
