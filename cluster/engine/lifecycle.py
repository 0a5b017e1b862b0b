"""How the requests of a language engine, and their choices, end: the doors are told, and everything that they
hold is freed.

A request ends when its last choice is complete or its KV has been sent, when its door cancels it, when it is
preempted, when it fails, or when it waits too long. If a transfer into or from its blocks is open then, the
request is CLOSING until the transfer has ended. Used on the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.engine.adapters import HeldAdapters
from cluster.engine.counts import SequenceCounts
from cluster.engine.features import FeatureStore
from cluster.engine.kv_input import KvInput
from cluster.engine.kv_output import KvOutput
from cluster.engine.prefix_loader import PrefixLoader
from cluster.engine.runner import LanguageRunner
from cluster.engine.state import AnswerChoice, LanguagePhase, LanguageRequest
from cluster.errors import ClusterError, OverwrittenError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.queue import WaitingQueue
from cluster.structure.constraints import Constraints
from cluster.types.messages import Failed, FinishReason, Preempted, TokenEvent
from cluster.worker.blame import bookkeeping
from cluster.worker.deadlines import Deadlines
from cluster.worker.outbox import DoorId, Outbox
from kv_transfer.lease.events import Finished, LeaseEvent, SendEvent

WAITED_FOR = {
    LanguagePhase.WAITING: "free KV blocks",
    LanguagePhase.ARRIVING: "the prompt's KV cache",
    LanguagePhase.COMPUTING: "embeddings or its turn to compute the prompt",
    LanguagePhase.SENDING: "the decode worker",
}


class RequestTable(dict[str, LanguageRequest]):
    """The requests of an engine, by id, from its `start` until they have left it. `deadlines`: by request id.
    The id of a request that has ended expires, too, and is ignored then."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.deadlines = Deadlines(clock)

    def add(self, request: LanguageRequest) -> None:
        self[request.request_id] = request

    def remove(self, request_id: str) -> None:
        del self[request_id]

    def live(self, request_id: str) -> LanguageRequest | None:
        """The request, unless it is unknown, has ended or is closing."""
        request = self.get(request_id)
        return None if request is None or request.is_closing else request

    def of_door(self, door: DoorId) -> list[str]:
        """Ids of the door's requests, in order of arrival."""
        return [request_id for request_id, request in self.items() if request.door == door]


@dataclass(frozen=True)
class EngineState:
    """What the parts of an engine share: its requests, and all that these may hold."""

    requests: RequestTable
    blocks: BlockPool
    admission: PromptAdmission  # of requests whose prompts are computed here
    arrivals: WaitingQueue  # requests whose KV arrives, and that have no blocks
    counts: SequenceCounts
    computing: set[str]  # ids of requests whose prompts are computed
    runner: LanguageRunner
    features: FeatureStore
    kv_input: KvInput
    kv_output: KvOutput
    loader: PrefixLoader | None  # None: the KV cache has no second tier
    constraints: Constraints | None  # None: no request may have a structure
    adapters: HeldAdapters | None  # None: no request may have an adapter


@dataclass(eq=False)
class Lifecycle:
    """unschedule(request): no further step computes tokens of the request. on_ended(request_id) is called
    once for each request whose answer was to be generated here."""

    _state: EngineState
    _outbox: Outbox
    _unschedule: Callable[[LanguageRequest], None]
    _on_ended: Callable[[str], None]
    num_preempted: int = 0  # requests, since the start
    num_prompts: int = 0  # requests with prompt tokens that are still to be computed here …
    num_missing_tokens: int = 0  # … and how many tokens these are

    def count_missing(self, request: LanguageRequest) -> None:
        """Brings the two counts up to date after the request has changed."""
        self._count(request, request.num_missing_tokens)

    def _count(self, request: LanguageRequest, num_missing: int) -> None:
        num_before = request.count_missing(num_missing)
        self.num_missing_tokens += num_missing - num_before
        self.num_prompts += (num_missing > 0) - (num_before > 0)

    def cancel(self, request_id: str, choice_idx: int | None) -> None:
        """Ends a request, or one choice of it. Unknown requests and requests that have ended are ignored."""
        request = self._state.requests.live(request_id)
        if request is None:
            return
        if choice_idx is not None and not request.sends:
            self.end_choice(request, request.choices[choice_idx])
            if request.live_choices:
                return
        self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
        self.close(request, "cancelled")

    def preempt(self, request: LanguageRequest) -> None:
        """The request loses its blocks. Its door asks for the rest of it again."""
        self.num_preempted += 1
        self._outbox.send(request.door, Preempted(request.request_id))
        self.close(request, "preempted")

    def expire(self, request_id: str) -> None:
        """The request has waited too long. Requests that run or have ended are ignored."""
        request = self._state.requests.live(request_id)
        if request is not None and request.phase is not LanguagePhase.RUNNING:
            self.fail(
                request, UnavailableError(f"the request waited too long for {WAITED_FOR[request.phase]}")
            )

    def fail_named(self, request_id: str, error: ClusterError) -> None:
        """Unknown requests and requests that have ended are ignored."""
        if (request := self._state.requests.live(request_id)) is not None:
            self.fail(request, error)

    def fail(self, request: LanguageRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self.close(request, error.message)

    def fail_readers(self, feature_blocks: Iterable[int]) -> None:
        """An encoder has written to these blocks of the feature memory after they had been given to another
        item (`LateWrite` of `kv_transfer.lease.receiver`). Everything computed from those rows is suspect:
        the requests that read them, the prefix cache, and the requests that share KV blocks with these
        requests. All of them fail; none may answer."""
        requests, harmed = self._state.requests, self._state.features.harmed_by(feature_blocks)
        readers = [requests[request_id] for request_id in harmed if request_id in requests]
        if readers:
            kv_blocks = {block_id for reader in readers for block_id in reader.held_blocks}
            names = {reader.request_id for reader in readers}
            self._fail_holders(
                kv_blocks, names, "its embeddings were overwritten by an encoder that came late"
            )

    def fail_holders(self, block_ids: Iterable[int]) -> None:
        """Another worker has written to these KV blocks after its lease had been revoked. All requests that
        hold one of the blocks fail, and the prefix cache is suspect."""
        self._fail_holders(set(block_ids), set(), "its KV cache was overwritten by a worker that came late")

    def _fail_holders(self, kv_blocks: set[int], names: set[str], why: str) -> None:
        self._state.blocks.forget_all()
        if self._state.loader is not None:
            self._state.loader.forget()
        for request in list(self._state.requests.values()):
            is_harmed = request.request_id in names or not kv_blocks.isdisjoint(request.held_blocks)
            if is_harmed and not request.is_closing:
                self.fail(request, OverwrittenError(why))

    def release_merged(self, request: LanguageRequest) -> None:
        """Releases items that no further step reads: they are computed, or in the cached prefix."""
        for item_idx, item in enumerate(request.main.prompt.media):
            if item.end <= request.main.num_computed_tokens:
                self._state.features.release((request.request_id, item_idx))

    def on_sent(self, request: LanguageRequest, event: LeaseEvent | SendEvent) -> None:
        """The transfer of the request's KV to another worker has ended."""
        if request.is_closing or isinstance(event, Finished):
            self.end(request)
        else:
            self.fail(request, UnavailableError(f"the KV cache could not be sent to decode: {event}"))

    @bookkeeping
    def close(self, request: LanguageRequest, reason: str) -> None:
        """Ends the request. Blocks that an open transfer reads or writes are freed when it has ended."""
        self._release_features(request)
        self._unschedule(request)
        kv_input, kv_output = self._state.kv_input, self._state.kv_output
        if kv_input.try_cancel(request):
            request.move(LanguagePhase.CLOSING)
        elif kv_output.is_open(request):
            request.move(LanguagePhase.CLOSING)
            kv_output.abort(request, reason)
        else:
            self.end(request)

    @bookkeeping
    def end(self, request: LanguageRequest) -> None:
        """No step computes tokens of the request any more, and no transfer of its blocks is open."""
        self._release_features(request)
        for choice in request.live_choices:
            self.end_choice(request, choice)
        for sequence in request.sequences:
            self._state.blocks.free(sequence.blocks)
        self._state.blocks.free(request.copy_blocks)
        self._count(request, 0)
        self._state.counts.end(request)
        self._state.admission.remove(request.request_id)
        self._state.arrivals.remove(request.request_id)
        self._state.requests.remove(request.request_id)
        if request.request.structure is not None and self._state.constraints is not None:
            self._state.constraints.forget(request.request_id)
        if not request.sends:
            self._on_ended(request.request_id)

    @bookkeeping
    def end_choice(self, request: LanguageRequest, choice: AnswerChoice) -> None:
        """Frees what the choice holds. A choice that has ended is ignored."""
        if choice.is_done:
            return
        self._state.counts.end_choice(request, choice)
        for sequence in request.end_choice(choice):
            self._state.blocks.free(sequence.blocks)
        self._state.runner.forget(choice)

    def _release_features(self, request: LanguageRequest) -> None:
        """Items that have been released already are ignored."""
        for item_idx in range(len(request.request.prompt.media)):
            self._state.features.release((request.request_id, item_idx), has_ended=True)
