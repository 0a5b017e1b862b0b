"""What requests do, from their submission until every worker has let go of them: one state machine for all
requests of a door.

    submit    predict the time to first token; admission admits the request, has it wait, or refuses it
    start     place it and start its workers (`router.flow.attempts`)
    deliver   per choice: its tokens in order, or the error that ends it
    resume    after a preemption, or the loss of a worker, each unfinished choice continues in another
              attempt; the client notices a pause
    wait      what no worker can take now waits for a worker to join, within the request's deadlines
    close     a choice is not read any more: what still runs for it is cancelled

Messages, events and the time come in; messages to workers, events for readers and the time of the next call
go out (`take_outputs`, `next_timer`). Pure: no event loop, no socket, no clock. The door, the tests' relay
and the simulator drive this same object; a driver carries the outputs out after every call.

An error in here concerns one request: that request ends with an internal error, all others go on. Only
`on_joined` raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from cluster.errors import UnavailableError
from cluster.types.members import Member
from cluster.types.messages import (
    AdaptersHeld,
    AnyMessage,
    DecodeGranted,
    FeatureGranted,
    Ping,
    RequestMessage,
    Stalled,
    Tokens,
)
from router.admission.controller import AdmissionController
from router.flow.attempts import Attempts
from router.flow.context import FlowContext, logged
from router.flow.continuation import Continuation, Unplaced
from router.flow.outputs import Output, Send
from router.flow.placer import Placer
from router.flow.quarantine import Quarantine
from router.flow.state import Attempt, ClientRequest, WorkerState
from router.flow.watch import WorkerWatch
from router.policy import Calibration, Decision, RequestView


@dataclass(frozen=True)
class Timeouts:
    """From the start of a request, after admission. Seconds."""

    first_token_s: float
    request_s: float


class RequestFlow:
    def __init__(self, placer: Placer, admission: AdmissionController, timeouts: Timeouts):
        self._placer = placer
        self._cluster = placer.cluster
        self._admission = admission
        self._timeouts = timeouts
        self._context = FlowContext(placer, timeouts.first_token_s)
        self.attempts = Attempts(self._context, admission, self._go_on)
        self._watch = WorkerWatch(
            self._ping,
            lambda worker: self._cluster.set_avoided(worker.replica_id, worker.is_avoided),
            self.attempts.on_silent,
        )
        self._clients: dict[str, ClientRequest] = {}  # that wait or run
        self.continuation = Continuation(self._context, self.attempts)
        self._unplaced = self.continuation.unplaced
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of ended requests are dropped late

    # State

    @property
    def num_running(self) -> int:
        """Attempts that have started and not landed."""
        return len(self.attempts)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been admitted yet."""
        return self._admission.num_waiting

    def num_by_adapter(self) -> tuple[Counter[str], Counter[str]]:
        """Requests of which an attempt has started, and those that wait for their first one, by the digest of
        their adapter; "": none. Looks at every request."""
        running, waiting = Counter[str](), Counter[str]()
        for client in self._clients.values():
            (running if client.num_attempts else waiting)[client.request.prompt.adapter] += 1
        return running, waiting

    @property
    def num_crashed(self) -> int:
        """Requests that an error of this door has ended, since the start."""
        return self._context.num_crashed

    @property
    def num_silences(self) -> int:
        """Times that a worker stopped making progress, since the start."""
        return self._watch.num_silences

    @property
    def quarantine(self) -> Quarantine:
        return self._context.quarantine

    @property
    def calibration(self) -> Calibration:
        return self._cluster.calibration

    @property
    def is_idle(self) -> bool:
        """Nothing is kept of any request."""
        is_any_left = self._clients or self._unplaced or not self.attempts.is_idle
        return not is_any_left and self._admission.is_idle and self._cluster.is_idle

    @property
    def workers(self) -> Collection[WorkerState]:
        """The workers that are connected."""
        return self._context.workers.values()

    # What the driver has to do

    def take_outputs(self) -> Sequence[Output]:
        """In order, since the last call."""
        return self._context.take_outputs()

    def next_timer(self) -> float | None:
        """When `on_timer` is to be called; None: when something else has happened."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._clients:
            heappop(deadlines)
        first = deadlines[0][0] if deadlines else inf
        for other in (self._admission.deadline, self._watch.next_look_at):
            first = first if other is None else min(first, other)
        return None if first == inf else first

    def on_timer(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            client = self._clients.get(heappop(self._deadlines)[1])
            if client is not None:
                self._end_overdue(client, now)
        self._watch.look_if_due(now)
        self._settle(now)

    def on_send_failed(self, request_id: str, error: Exception, now: float) -> None:
        """A message of this attempt could not be sent."""
        if (attempt := self.attempts.get(request_id)) is not None:
            self.attempts.end(attempt, error, now)
        self._settle(now)

    def on_call_failed(self, request_id: str, error: BaseException, now: float) -> None:
        """Ray Serve's call to the decode replica has ended with an error."""
        if (attempt := self.attempts.get(request_id)) is not None:
            refused = UnavailableError(f"the decode worker refused the request: {error}", retry_after_s=1.0)
            self.attempts.end(attempt, refused, now, attempt.decode)
        self._settle(now)

    # The client's side

    def submit(self, client: ClientRequest, now: float) -> None:
        """Each choice gets its events, or an error, as `Deliver` outputs. A choice that is not read to its
        end must be closed."""
        self._clients[client.request_id] = client
        client.started_at = now
        self._offer(client, now)
        self._settle(now)

    def close(self, request_id: str, choice_idx: int, now: float) -> None:
        """The choice is not read any more. Unknown ones are ignored."""
        client = self._clients.get(request_id)
        if client is None or not client.choices[choice_idx].is_open:
            return
        choice = client.choices[choice_idx]
        choice.is_open = False
        if choice.attempt is not None:
            self.attempts.close(choice.attempt, choice.idx, now)
        self._forget_if_over(client)
        self._settle(now)

    # The workers' side

    def on_joined(self, member: Member, now: float) -> None:
        """A worker is connected. Raises what the cluster view raises; then the worker has not joined."""
        self._placer.add(member)
        worker = self._context.join(member)
        self._watch.add(worker, now)
        self.quarantine.came_back(member.replica_id)
        self._place_unplaced(now)
        self._settle(now)

    def on_listed(self, replica_id: str, is_listed: bool, now: float) -> None:
        """Whether Serve names the worker. One that is not listed gets nothing new and keeps what it has."""
        worker = self._context.workers.get(replica_id)
        if worker is None:
            return
        worker.is_listed = is_listed
        with logged():
            self._cluster.set_listed(replica_id, is_listed)
        self.attempts.check_drained(worker)
        if is_listed:
            self._place_unplaced(now)
        self._settle(now)

    def on_message(self, replica_id: str, message: AnyMessage, now: float) -> None:
        worker = self._context.workers.get(replica_id)
        if worker is None:
            return
        self._watch.heard(worker, now)
        if isinstance(message, Tokens):
            if message.load is not None:
                with logged():
                    self._cluster.reported(replica_id, message.load, now)
                    self._admission.load_changed()
            self.attempts.on_tokens(worker, message.events, now)
        elif isinstance(message, RequestMessage) and message.request_id in self.attempts:
            self.attempts.on_message(worker, message, now)
        else:
            with logged():
                self._on_worker_message(worker, message, now)
        self._settle(now)

    def on_lost(self, replica_id: str, now: float) -> None:
        """The connection to the worker has ended."""
        worker = self._context.leave(replica_id)
        if worker is None:
            return
        self._watch.remove(worker)
        with logged():
            self._cluster.remove(replica_id)
        self.attempts.on_lost(worker, now)
        self._settle(now)

    def _report(self) -> None:
        self._admission.report(self._placer.capacity(), self._placer.reported())

    def _on_worker_message(self, worker: WorkerState, message: AnyMessage, now: float) -> None:
        """About no attempt that runs here."""
        if isinstance(message, Stalled):
            self._watch.told(worker, bool(message.threads), now)
        elif isinstance(message, DecodeGranted | FeatureGranted):
            # It has landed: no writer was given the grant.
            self._context.return_grant(worker, message.grant)
        else:
            self._placer.on_message(worker.replica_id, message)
            if isinstance(message, AdaptersHeld):
                self._place_unplaced(now)

    def _ping(self, worker: WorkerState) -> None:
        self._context.put(Send(worker.replica_id, Ping()))

    # Requests

    def _offer(self, client: ClientRequest, now: float) -> None:
        """Admission lets the request in at once, later, or not at all."""
        try:
            self.attempts.check_barred(client, now)
            self._report()
            view, decision = self._placer.decide(client, client.request_at(now), client.hashes, now)
            class_name = self._admission.class_name(client.request.priority)
            if self._admission.offer(self._placer.ticket(client, decision.prediction, class_name), now):
                self._begin(client, (view, decision), now)
        except Exception as error:  # it concerns this request alone
            self._not_begun(client, error)

    def _not_begun(self, client: ClientRequest, error: Exception) -> None:
        """Nothing runs for the request: it waits for a worker, or is refused."""
        try:
            if not isinstance(error, UnavailableError):
                raise error
            self._admission.leave(client.request_id)
            all_choices = range(len(client.choices))
            self._unplaced.add(Unplaced(client, client.request, all_choices, error))
            self._set_first_deadline(client)
        except Exception as refused:
            self._context.fail_choices(client, range(len(client.choices)), refused)
            self._forget(client)

    def _place_unplaced(self, now: float) -> None:
        """A worker has come, or holds other adapters: what waits for one is tried again."""
        for work in self._unplaced.take_all():
            if not any(work.client.choices[idx].is_open for idx in work.choice_idxs):
                continue
            if work.has_begun:
                self.continuation.start(work.client, work.request, work.choice_idxs, now)
            else:
                self._offer(work.client, now)

    def _begin(self, client: ClientRequest, decided: tuple[RequestView, Decision] | None, now: float) -> None:
        """The request is admitted. `decided`: None if it has waited, for the cluster has changed. Raises
        ClusterError."""
        self.attempts.check_barred(client, now)
        client.started_at = now
        request = client.request_at(now)
        view, decision = decided or self._placer.decide(client, request, client.hashes, now)
        self._watch.begin(now)
        client.count_attempt()
        self.attempts.start(client, request, range(len(client.choices)), view, decision, now)
        self._set_first_deadline(client)

    def _settle(self, now: float) -> None:
        """At the end of every call: admission may admit or refuse waiting requests."""
        if self._admission.takes_load(now):
            with logged():
                self._report()
        while settled := self._admission.settle(now):
            for request_id, error in settled:
                client = self._clients[request_id]
                try:
                    if error is not None:
                        raise error
                    self._begin(client, None, now)
                except Exception as refused:  # it concerns this request alone
                    self._not_begun(client, refused)

    def _forget(self, client: ClientRequest) -> None:
        """The request has ended, or none of it is read any more."""
        self._clients.pop(client.request_id, None)
        self._unplaced.forget(client)
        with logged():
            self._admission.leave(client.request_id)

    def _forget_if_over(self, client: ClientRequest) -> None:
        if not any(choice.is_live for choice in client.choices):
            self._forget(client)

    def _set_first_deadline(self, client: ClientRequest) -> None:
        self._set_deadline(client, min(self._timeouts.first_token_s, self._timeouts.request_s))

    def _set_deadline(self, client: ClientRequest, limit_s: float) -> None:
        if limit_s < inf and client.request_id in self._clients:
            heappush(self._deadlines, (client.started_at + limit_s, client.request_id))

    def _end_overdue(self, client: ClientRequest, now: float) -> None:
        """A deadline of the request has come: of its first tokens, or of all of it."""
        reason = self._unplaced.error_of(client) or UnavailableError("the request ran out of time")
        for choice_idx, choice in enumerate(client.choices):
            limit_s = self._timeouts.request_s
            if not choice.has_first_token:
                limit_s = min(limit_s, self._timeouts.first_token_s)
            has_time = now < client.started_at + limit_s
            if choice.is_open and not choice.is_over and not has_time:
                self._context.deliver(client, choice_idx, reason)
                self.close(client.request_id, choice_idx, now)
        if now < client.started_at + self._timeouts.request_s:
            self._set_deadline(client, self._timeouts.request_s)

    def _go_on(self, attempt: Attempt, preempted: Sequence[int], now: float) -> None:
        """These choices of an attempt go on in others. If it has landed, so does what it leaves undone."""
        has_landed = attempt.has_landed
        for choice_idx in preempted:
            self.continuation.resume(attempt, (choice_idx,), now)
        if not has_landed:
            return
        if attempt.failure is not None:
            for worker in attempt.blamed:
                self._watch.failed(worker, now)
            self.continuation.replay(attempt, attempt.failure, now)
        elif not attempt.has_failed and attempt.is_read:
            for worker in attempt.workers:
                self._watch.succeeded(worker, now)
        self._forget_if_over(attempt.client)
