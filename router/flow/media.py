"""The media side of an attempt: which encoder computes which item, and what happens when that fails.

    start     each item goes to the encoder it was placed at
    granted   the prompt worker has room for an item's embeddings: the item's encoder is told where
    shared    the prompt worker has the embeddings, or gets them, for another request: the item is called off
    failed    an encoder has given an item up, or its embeddings did not arrive: the next encoder is asked
    lost      an encoder is gone with all its items: the prompt worker is told, so that it grants new room
    silent    an encoder has made no progress for long: its items move to one that makes progress

An item in work at an encoder that was lost may be the cause: it is a suspect (`router.flow.quarantine`). An
encoder has one suspect at a time and the others are held here, so that a second loss tells which item it was.
A suspect goes to its encoder when the prompt worker has room for it: otherwise it could wait for the room of
one that waits for it.

Every worker knows an item by its media hash, so encoding one twice does no harm. Bad media fails at once: no
encoder can help it.
"""

from __future__ import annotations

from cluster.errors import (
    ClusterError,
    InternalError,
    MediaError,
    OverloadedError,
    UnavailableError,
    from_info,
)
from cluster.media.settings import item_name
from cluster.types.messages import (
    Cancel,
    EncoderLost,
    EncodeTarget,
    Failed,
    FeatureGranted,
    StartEncode,
)
from router.flow.context import FlowContext
from router.flow.quarantine import barred_item
from router.flow.state import Attempt, WorkerState

MAX_ATTEMPTS = 3  # of one item, over all encoders


class MediaFlow:
    """The media of all attempts of a door."""

    def __init__(self, context: FlowContext):
        self._context = context
        self._cluster = context.cluster
        self._quarantine = context.quarantine
        self._suspects: dict[WorkerState, tuple[Attempt, int]] = {}  # the one that each encoder has
        self._held: list[tuple[Attempt, int]] = []

    @property
    def is_idle(self) -> bool:
        return not self._suspects and not self._held

    def own_items(self, attempt: Attempt, now: float) -> tuple[int, ...]:
        """Items that the prompt worker encodes itself, without a grant. Of a suspect the door must know that
        there is room."""
        return tuple(
            item_idx
            for item_idx, state in enumerate(attempt.media)
            if state.encoder is attempt.prompt_worker and not state.is_shared
            if not self._quarantine.is_suspect(attempt.items[item_idx].media_hash, now)
        )

    def start(self, attempt: Attempt, now: float) -> None:
        """Each item goes to its encoder, unless another one of the request brings the same embeddings."""
        for item_idx, state in enumerate(attempt.media):
            if not state.is_shared:
                self._start(attempt, item_idx, now)

    def on_granted(self, attempt: Attempt, granted: FeatureGranted, now: float) -> None:
        item_idx = granted.item_idx
        state = attempt.media[item_idx]
        state.grant = granted.grant
        if state.is_shared:  # the other request has failed or left, or the item was not cached
            state.is_shared = False
            self._start_again(attempt, item_idx, now)
        elif state.lease_id and not state.is_held:  # what this encoder sent did not arrive
            state.num_attempts += 1
            if state.num_attempts > MAX_ATTEMPTS:
                error = UnavailableError(f"the embeddings of media item {item_idx} did not arrive")
                return self._context.fail(attempt, error, state.encoder)
            self._start_again(attempt, item_idx, now)
        elif state.is_held:
            self._start(attempt, item_idx, now)
        else:
            self._pass_on(attempt, item_idx)

    def on_encoded(self, attempt: Attempt, item_idx: int, now: float) -> None:
        """The encoder survived the item."""
        self._quarantine.survived(attempt.items[item_idx].media_hash)
        self._release(attempt, item_idx, now)

    def on_shared(self, attempt: Attempt, item_idx: int, now: float) -> None:
        state = attempt.media[item_idx]
        state.is_shared = True
        self._cluster.item_done(attempt.request_id, item_idx)
        if not state.is_held:
            self._cancel(attempt, item_idx, state.encoder)
        self._release(attempt, item_idx, now)

    def on_failed(self, attempt: Attempt, worker: WorkerState, message: Failed, now: float) -> None:
        item_idx = message.item_idx
        error = from_info(message.error)
        if item_idx is None or attempt.has_first_token:
            return
        state = attempt.media[item_idx]
        if state.encoder is not worker or state.is_shared:
            return  # an earlier encoder's message, or one about an item that is not needed from this encoder
        self._release(attempt, item_idx, now)
        if isinstance(error, MediaError):
            self._quarantine.survived(attempt.items[item_idx].media_hash)
            item = attempt.items[item_idx]
            name = item_name(item.modality, item.item_idx)
            self._context.fail(
                attempt, MediaError(f"{name}: {error.message}", param=error.param or item.param)
            )
        elif isinstance(error, UnavailableError | OverloadedError | InternalError):
            self._cancel(attempt, item_idx, worker)  # in case it was asked again meanwhile
            self._move(attempt, item_idx, error, now)
        else:
            self._context.fail(attempt, error)

    def on_lost(self, attempt: Attempt, worker: WorkerState, now: float) -> None:
        self._suspects.pop(worker, None)
        if attempt.has_first_token:
            return
        for item_idx, state in enumerate(attempt.media):
            if state.encoder is not worker or attempt.has_failed:
                continue
            item = attempt.items[item_idx]
            if item_idx in attempt.unencoded and not state.is_shared and not state.is_held:
                self._quarantine.lost(item.media_hash, worker.replica_id, now)
                if self._quarantine.is_barred(item.media_hash, now):
                    return self._context.fail(attempt, barred_item(item))
            self._give_up(attempt, item_idx, now)
            self._move(
                attempt, item_idx, UnavailableError("the encode worker was lost", retry_after_s=1.0), now
            )

    def on_silent(self, attempt: Attempt, worker: WorkerState, now: float) -> None:
        """The worker may continue later, so its items are called off. An item stays if

        * no other encoder makes progress, or
        * it has moved before: an item can be so large that every encoder is silent over it.
        """
        if attempt.has_first_token:
            return
        for item_idx, state in enumerate(attempt.media):
            is_first = state.num_attempts == 1 and not state.is_shared and not state.is_held
            is_wanted = is_first and item_idx in attempt.unencoded
            if state.encoder is not worker or not is_wanted or not self._can_move(attempt, item_idx, now):
                continue
            self._give_up(attempt, item_idx, now)
            self._cancel(attempt, item_idx, worker)
            self._move(attempt, item_idx, UnavailableError("the encode worker makes no progress"), now)

    def on_landed(self, attempt: Attempt, now: float) -> None:
        """However the attempt ended."""
        for item_idx, state in enumerate(attempt.media):
            if state.grant is not None:  # no encoder was given it
                self._context.return_grant(attempt.prompt_worker, state.grant)
                state.grant = None
            if state.is_held:
                state.is_held = False
                self._held.remove((attempt, item_idx))
            self._release(attempt, item_idx, now)

    def _can_move(self, attempt: Attempt, item_idx: int, now: float) -> bool:
        try:
            other = self._next_encoder(attempt, item_idx, now)
        except UnavailableError:
            return False
        return not other.is_silent

    def _next_encoder(self, attempt: Attempt, item_idx: int, now: float) -> WorkerState:
        """Raises UnavailableError if there is none beside the one that has the item."""
        last = attempt.media[item_idx].encoder.replica_id
        return self._context.workers[self._context.placer.next_encoder(attempt, item_idx, last, now)]

    def _give_up(self, attempt: Attempt, item_idx: int, now: float) -> None:
        """The item's encoder does not bring it any more: the prompt worker grants other room."""
        lease_id = attempt.media[item_idx].lease_id
        if lease_id:
            lost = EncoderLost(attempt.request_id, item_idx, lease_id)
            self._context.send(attempt.prompt_worker, lost, attempt)
        self._release(attempt, item_idx, now)

    def _pass_on(self, attempt: Attempt, item_idx: int) -> None:
        """The grant of the item goes to its encoder, if it has come."""
        state = attempt.media[item_idx]
        grant, state.grant = state.grant, None
        if grant is None:
            return
        state.lease_id = grant.lease_id
        target = EncodeTarget(attempt.request_id, item_idx, grant)
        self._context.pass_on(attempt, attempt.prompt_worker, state.encoder, target)

    def _cancel(self, attempt: Attempt, item_idx: int, encoder: WorkerState) -> None:
        self._context.send(encoder, Cancel(attempt.request_id, item_idx=item_idx), attempt)

    def _may_go(self, attempt: Attempt, item_idx: int, now: float) -> bool:
        """False: the item is a suspect, and it has no room yet or its encoder has another one. A suspect that
        may go is the encoder's from now on."""
        media_hash = attempt.items[item_idx].media_hash
        if not self._quarantine.is_suspect(media_hash, now):
            return True
        state = attempt.media[item_idx]
        if state.grant is None:
            return False
        there, idx = self._suspects.setdefault(state.encoder, (attempt, item_idx))
        return there.items[idx].media_hash == media_hash

    def _release(self, attempt: Attempt, item_idx: int, now: float) -> None:
        """The item's encoder does not have it any more. If it was a suspect, the next one may go there."""
        encoder = attempt.media[item_idx].encoder
        if self._suspects.get(encoder) != (attempt, item_idx):
            return
        del self._suspects[encoder]
        held, self._held = self._held, []
        for other, idx in held:
            state = other.media[idx]
            if other.has_landed or other.has_failed or state.is_shared:
                state.is_held = False
            elif state.encoder is encoder and self._may_go(other, idx, now):
                state.is_held = False
                with self._context.isolated(other):
                    self._send(other, idx)
            else:
                self._held.append((other, idx))

    def _start(self, attempt: Attempt, item_idx: int, now: float) -> None:
        """At once, or as soon as the item may go to its encoder."""
        state = attempt.media[item_idx]
        may_go = self._may_go(attempt, item_idx, now)
        if may_go and state.is_held:
            state.is_held = False
            self._held.remove((attempt, item_idx))
        elif not may_go and not state.is_held:
            state.is_held = True
            self._held.append((attempt, item_idx))
        if may_go:
            self._send(attempt, item_idx)

    def _send(self, attempt: Attempt, item_idx: int) -> None:
        state, item, request = attempt.media[item_idx], attempt.items[item_idx], attempt.request
        num_rows_before = sum(earlier.num_call_rows for earlier in attempt.items[:item_idx])
        order = (request.priority, request.waited_s, num_rows_before)
        keep = item.media_hash in attempt.returning
        start = StartEncode(request.request_id, item_idx, item, self._context.timeout_s, *order, keep)
        self._context.send(state.encoder, start, attempt)
        self._pass_on(attempt, item_idx)

    def _move(self, attempt: Attempt, item_idx: int, error: ClusterError, now: float) -> None:
        """Moves the item to another encoder. The attempt fails with `error` if there is none, or after too
        many."""
        state = attempt.media[item_idx]
        state.num_attempts += 1
        state.lease_id = ""
        if state.num_attempts > MAX_ATTEMPTS:
            return self._context.fail(attempt, error, state.encoder)
        try:
            encoder = self._next_encoder(attempt, item_idx, now)
        except UnavailableError:
            return self._context.fail(attempt, error, state.encoder)
        if state.encoder is attempt.prompt_worker:  # it has granted no lease, or not used the one it granted
            self._context.send(state.encoder, EncoderLost(attempt.request_id, item_idx, ""), attempt)
        attempt.move_item(item_idx, encoder)
        if not state.is_shared:
            self._start_again(attempt, item_idx, now)

    def _start_again(self, attempt: Attempt, item_idx: int, now: float) -> None:
        attempt.item_missing(item_idx)
        self._cluster.item_moved(attempt.request_id, item_idx, attempt.media[item_idx].encoder.replica_id)
        self._start(attempt, item_idx, now)
