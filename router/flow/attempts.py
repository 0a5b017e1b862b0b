"""The attempts of a door: each goes to its workers, is told what they say, and lands.

    start     the prompt worker and the encoders are started at the same time; the decode worker,
              if it is another one, as soon as the prompt worker has the memory
    grants    decode's grant goes to the prompt worker, whose grants go to the encoders (`router.flow.media`)
    tokens    per choice: the prompt worker's first token, then decode's
    land      as soon as the last token of every choice has come, read or not, or the attempt has failed: its
              charges are freed, and every worker that may still hold something is told to let go
    replay    if it failed because a worker was lost, is stopped, or gave it up for want of another one, other
              attempts go on with what is left of it (`router.flow.continuation`)

An error in here concerns one attempt: that attempt ends with an internal error, all others go on. Pure: `now`
is passed in, outputs go to the context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from cluster.errors import (
    UnavailableError,
    from_info,
)
from cluster.types.members import Phase
from cluster.types.messages import (
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Encoded,
    Failed,
    FeatureGranted,
    FeatureShared,
    Preempted,
    PrefillAdmitted,
    RequestMessage,
    StartDecode,
    StartPrefill,
    TokenEvent,
)
from cluster.types.request import GenerateRequest
from router.admission.controller import AdmissionController
from router.flow.context import FlowContext, logged
from router.flow.media import MediaFlow
from router.flow.outputs import CallDecode, Drained, Placed, Send
from router.flow.quarantine import barred_item, barred_request, content_of
from router.flow.state import Attempt, ClientRequest, WorkerState
from router.policy import Decision, RequestView

logger = logging.getLogger(__name__)

MAX_MOVES = 2  # times that a choice leaves a worker that makes no progress: perhaps all are merely slow


class Attempts(Mapping[str, Attempt]):
    """Those that have started and not landed, by the id of their request."""

    def __init__(
        self,
        context: FlowContext,
        admission: AdmissionController,
        go_on: Callable[[Attempt, Sequence[int], float], None],
    ):
        """`go_on(attempt, choice_idxs, now)`: these choices of it were preempted, or it has landed."""
        self._context = context
        self._admission = admission
        self._go_on = go_on
        self._placer = context.placer
        self._cluster = context.cluster
        self._quarantine = context.quarantine
        self._media = MediaFlow(context)
        self._attempts: dict[str, Attempt] = {}

    def __getitem__(self, request_id: str) -> Attempt:
        return self._attempts[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def is_idle(self) -> bool:
        """No attempt runs, and none of their media items is a suspect or held here."""
        return not self._attempts and self._media.is_idle

    def start(
        self,
        client: ClientRequest,
        request: GenerateRequest,
        choice_idxs: Sequence[int],
        view: RequestView,
        decision: Decision,
        now: float,
    ) -> None:
        """Raises KeyError if a worker of the decision is not connected, and has then started nothing."""
        placement = decision.placement
        attempt = Attempt(
            client=client,
            request=request,
            choice_idxs=choice_idxs,
            encoders=[self._context.workers[replica_id] for replica_id in placement.encoders],
            prompt_worker=self._context.workers[placement.prefill],
            decode=self._context.workers[placement.decode],
            codec=placement.codec,
            returning=self._placer.returning(client.items),
            content=content_of(client.request, client.hashes, view.block_size),
            started_at=now,
            cached=self._placer.cached_items(view, placement.prefill),
        )
        self._attempts[request.request_id] = attempt
        for worker in attempt.workers:
            worker.add_request()
        for idx, client_idx in enumerate(choice_idxs):
            client.choices[client_idx].go_on_in(attempt, idx)
        with self._context.isolated(attempt):
            self._send_first(attempt, view, decision, now)
        self.advance(attempt, now)
        for idx, client_idx in enumerate(choice_idxs):
            if not client.choices[client_idx].is_open:  # it was closed before
                self.close(attempt, idx, now)

    def close(self, attempt: Attempt, choice_idx: int, now: float) -> None:
        """The choice is not read any more."""
        choice = attempt.choices[choice_idx]
        choice.is_open = False
        if not attempt.has_landed and not attempt.is_over and not choice.is_finished:
            self._context.send(attempt.decode, Cancel(attempt.request_id, choice_idx), attempt)
        self.advance(attempt, now)

    def check_barred(self, client: ClientRequest, now: float) -> None:
        """Raises QuarantinedError."""
        if not self._quarantine:
            return
        for item in client.items:
            if self._quarantine.is_barred(item.media_hash, now):
                raise barred_item(item)
        if self._quarantine.is_barred(
            content_of(client.request, client.hashes, self._placer.block_size), now
        ):
            raise barred_request()

    def on_tokens(self, worker: WorkerState, events: Sequence[TokenEvent], now: float) -> None:
        """The tokens of one step. Those of requests that have landed are dropped."""
        for event in events:
            attempt = self._attempts.get(event.request_id)
            if attempt is None:
                continue
            with self._context.isolated(attempt):
                self._on_tokens(attempt, worker, event, now)
            if event.finish_reason is not None or worker is not attempt.decode or attempt.has_failed:
                self.advance(attempt, now)

    def on_message(self, worker: WorkerState, message: RequestMessage, now: float) -> None:
        attempt = self._attempts[message.request_id]
        with self._context.isolated(attempt):
            self._on_message(attempt, worker, message, now)
        self.advance(attempt, now)

    def on_lost(self, worker: WorkerState, now: float) -> None:
        """The worker is gone."""
        for attempt in list(self._attempts.values()):
            with self._context.isolated(attempt):
                self._on_lost(attempt, worker, now)
            self.advance(attempt, now)

    def on_silent(self, worker: WorkerState, now: float) -> None:
        """The worker has made no progress for long: what it has goes to workers that do. It may continue
        later: what it sends then is about attempts that have landed, and what it writes is fenced."""
        for attempt in list(self._attempts.values()):
            with self._context.isolated(attempt):
                self._on_silent(attempt, worker, now)
            self.advance(attempt, now)

    def end(self, attempt: Attempt, error: Exception, now: float, *blamed: WorkerState) -> None:
        """Fail the attempt; an error that is not a ClusterError is this door's own."""
        self._context.fail(attempt, self._context.known(error), *blamed)
        self.advance(attempt, now)

    # Steps

    def _send_first(self, attempt: Attempt, view: RequestView, decision: Decision, now: float) -> None:
        attempt.client.timeline.placed(now, decision)
        self._placer.charge(view, decision, now)
        self._context.put(Placed(attempt.client.timeline))
        own_items = self._media.own_items(attempt, now)
        if attempt.is_local:
            self._start_decode(attempt, own_items)
        else:
            start = StartPrefill(attempt.request, self._context.timeout_s, own_items, attempt.cached)
            self._context.send(attempt.prompt_worker, start, attempt)
        self._media.start(attempt, now)

    def _start_decode(self, attempt: Attempt, own_items: tuple[int, ...] = ()) -> None:
        media = (own_items, attempt.cached) if attempt.is_local else ()
        start = StartDecode(attempt.request, self._context.timeout_s, attempt.is_local, attempt.codec, *media)
        self._context.send(attempt.decode, start, attempt)
        self._context.put(CallDecode(attempt.decode.replica_id, attempt.request_id))

    def _on_tokens(self, attempt: Attempt, worker: WorkerState, event: TokenEvent, now: float) -> None:
        is_first = attempt.num_tokens == 0
        ready = attempt.on_tokens(worker, event)
        if is_first and attempt.num_tokens:
            self._placer.first_token(attempt, event.timing, now)
            self._admission.done(attempt.client.request_id)
        for each in ready:
            self._context.answer(attempt, event.choice_idx, each)

    def _on_message(self, attempt: Attempt, worker: WorkerState, message: RequestMessage, now: float) -> None:
        if isinstance(message, PrefillAdmitted):
            attempt.has_memory = True
            self._start_decode(attempt)
        elif isinstance(message, DecodeGranted):
            target = DecodeTarget(attempt.request_id, message.grant)
            self._context.pass_on(attempt, attempt.decode, attempt.prompt_worker, target)
        elif isinstance(message, FeatureGranted):
            self._media.on_granted(attempt, message, now)
        elif isinstance(message, FeatureShared):
            self._media.on_shared(attempt, message.item_idx, now)
            self._item_done(attempt, message.item_idx)
        elif isinstance(message, Encoded):
            self._on_encoded(attempt, worker, message, now)
        elif isinstance(message, Preempted):
            attempt.on_preempted()
        elif isinstance(message, Failed) and message.item_idx is not None:
            self._media.on_failed(attempt, worker, message, now)
        elif isinstance(message, Failed) and attempt.needs(worker):
            self._context.fail(attempt, from_info(message.error))

    def _on_encoded(self, attempt: Attempt, worker: WorkerState, message: Encoded, now: float) -> None:
        """The encoder has told the prompt worker by its own notification."""
        if attempt.media[message.item_idx].encoder is not worker:
            return  # the item has moved: another encoder has it now
        self._media.on_encoded(attempt, message.item_idx, now)
        attempt.client.timeline.encoded(message.item_idx, message.timing, message.cached)
        self._cluster.item_done(message.request_id, message.item_idx, now)
        self._item_done(attempt, message.item_idx)

    def _item_done(self, attempt: Attempt, item_idx: int) -> None:
        attempt.item_arrived(item_idx)
        if not attempt.unencoded:
            self._admission.encoded(attempt.client.request_id)

    def _on_lost(self, attempt: Attempt, worker: WorkerState, now: float) -> None:
        """The worker may have a part in the attempt."""
        self._media.on_lost(attempt, worker, now)
        if attempt.needs(worker):
            if attempt.has_memory or worker is attempt.decode:
                self._quarantine.lost(attempt.content, worker.replica_id, now, attempt.client.num_tokens)
            is_barred = self._quarantine.is_barred(attempt.content, now)
            lost = UnavailableError(f"the {worker.role} worker was lost", retry_after_s=1.0)
            self._context.fail(attempt, barred_request() if is_barred else lost, worker)

    def _on_silent(self, attempt: Attempt, worker: WorkerState, now: float) -> None:
        if worker.role.encodes:
            self._media.on_silent(attempt, worker, now)
        if attempt.needs(worker) and attempt.num_losses < MAX_MOVES and self._can_do_without(worker):
            stopped = UnavailableError(f"the {worker.role} worker makes no progress", retry_after_s=1.0)
            self._context.fail(attempt, stopped, worker)

    def _can_do_without(self, worker: WorkerState) -> bool:
        """Whether other workers that make progress can do all that it does, but encoding."""
        moving = {
            other.role for other in self._context.workers.values() if other.is_listed and not other.is_silent
        }
        phases = {phase for role in moving for phase in role.phases}
        if Phase.DECODE in phases:
            phases.add(Phase.PREFILL)
        return worker.role.phases - {Phase.ENCODE} <= phases

    def advance(self, attempt: Attempt, now: float) -> None:
        """Lands the attempt if it is over, and has its preempted choices go on."""
        if attempt.has_landed:
            return
        resumable = [idx for idx, choice in enumerate(attempt.choices) if choice.is_resumable]
        lands = attempt.is_over
        if lands:
            self._land(attempt, now)
        for choice_idx in resumable:
            attempt.choices[choice_idx].is_open = False
        if lands or resumable:
            self._go_on(attempt, resumable, now)

    def _land(self, attempt: Attempt, now: float) -> None:
        """Every worker that may still hold something lets go. If decode has ended the request, the prompt
        worker has, too. If the prompt worker has ended it, decode waits for this Cancel; an encoder may be
        left with an item that the prompt worker found in its prefix cache."""
        del self._attempts[attempt.request_id]
        attempt.has_landed = True
        if self._quarantine and not attempt.has_failed and attempt.is_read:
            self._quarantine.survived(attempt.content)
        with logged():
            self._media.on_landed(attempt, now)
        with logged():
            self._placer.landed(attempt)
        ended = [attempt.prompt_worker, attempt.decode] if attempt.is_over_at_decode else []
        encoding = [attempt.media[item_idx].encoder for item_idx in attempt.unencoded]
        for worker in attempt.workers:
            worker.drop_request()
            if (worker not in ended or worker in encoding) and not worker.is_lost:
                self._context.put(Send(worker.replica_id, Cancel(attempt.request_id)))
            self.check_drained(worker)

    def check_drained(self, worker: WorkerState) -> None:
        if not worker.is_listed and not worker.is_lost and worker.num_requests == 0:
            self._context.put(Drained(worker.replica_id))
