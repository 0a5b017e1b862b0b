"""How the requests of a prefill worker end: their doors are told, and everything that they hold is freed.

A request ends when its KV has been sent, when its door cancels it, when it fails or when it waits too long.
If a transfer from its blocks is open then, the request is CLOSING until the transfer has ended. Used on the
engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.errors import ClusterError, UnavailableError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.scheduling.admission import PromptAdmission
from cluster.types.messages import Failed, FinishReason, TokenEvent
from cluster.worker.blame import bookkeeping
from cluster.worker.outbox import Outbox
from cluster.worker.requests import RequestTable
from kv_transfer.lease.events import Finished, LeaseEvent, SendEvent
from prefill_service.features import FeatureStore
from prefill_service.state import PrefillPhase, PrefillRequest
from prefill_service.transfer import Targets


class PrefillLifecycle:
    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        blocks: BlockPool,
        features: FeatureStore,
        targets: Targets,
        admission: PromptAdmission,
        outbox: Outbox,
        unschedule: Callable[[PrefillRequest], None],
    ):
        """`unschedule(request)`: no further step computes tokens of the request. May be called again for the
        same request."""
        self._requests = requests
        self._blocks = blocks
        self._features = features
        self._targets = targets
        self._admission = admission
        self._outbox = outbox
        self._unschedule = unschedule
        self.num_missing_tokens = 0  # of all requests: prompt tokens that are still to be computed

    def count_missing(self, request: PrefillRequest) -> None:
        """Brings `num_missing_tokens` up to date after the request has changed."""
        self.num_missing_tokens += request.num_missing_tokens - request.num_counted_tokens
        request.num_counted_tokens = request.num_missing_tokens

    def cancel(self, request_id: str) -> None:
        """Unknown requests and requests that have ended are ignored."""
        if (request := self._requests.live(request_id)) is not None:
            self._outbox.token(request.door, TokenEvent(request_id, (), FinishReason.CANCELLED))
            self._close(request, "cancelled")

    def expire(self, request_id: str) -> None:
        """The request has waited too long. Requests that have ended are ignored."""
        if (request := self._requests.live(request_id)) is not None:
            waited_for = {
                PrefillPhase.WAITING: "free KV blocks",
                PrefillPhase.RUNNING: "embeddings or its turn",
                PrefillPhase.SENDING: "the decode worker",
            }[request.phase]
            self.fail(request, UnavailableError(f"prefill waited too long for {waited_for}"))

    def fail_named(self, request_id: str, error: ClusterError) -> None:
        """Unknown requests and requests that have ended are ignored."""
        if (request := self._requests.live(request_id)) is not None:
            self.fail(request, error)

    def fail(self, request: PrefillRequest, error: ClusterError) -> None:
        self._outbox.send(request.door, Failed(request.request_id, to_info(error)))
        self._close(request, error.message)

    def fail_harmed(self, block_ids: Sequence[int]) -> None:
        """An encoder has written to these blocks of the feature memory after they had been given to another
        item (`LateWrite` of `kv_transfer.lease.receiver`). Everything computed from those rows is suspect:
        the requests that read them, the prefix cache, and the requests that share KV blocks with these
        requests. All of them fail; none may answer."""
        harmed = self._features.harmed_by(block_ids)
        readers = [self._requests[request_id] for request_id in harmed if request_id in self._requests]
        if not readers:
            return
        self._blocks.forget_all()
        kv_blocks = {block_id for reader in readers for block_id in reader.held_blocks}
        for request in list(self._requests.values()):
            if not request.is_closing and (request in readers or kv_blocks & request.held_blocks):
                self.fail(
                    request, UnavailableError("its embeddings were overwritten by an encoder that came late")
                )

    def on_sent(self, request: PrefillRequest, event: LeaseEvent | SendEvent) -> None:
        """The transfer of the request's KV has ended."""
        if request.is_closing or isinstance(event, Finished):
            self._end(request)
        else:
            self.fail(request, UnavailableError(f"the KV cache could not be sent to decode: {event}"))

    @bookkeeping
    def _close(self, request: PrefillRequest, reason: str) -> None:
        """Ends the request. Blocks that a posted write still reads are freed when the write has ended."""
        self._release_features(request)
        self._unschedule(request)
        if request.outgoing is not None and request.outgoing.lease_id in self._targets.by_lease:
            request.move(PrefillPhase.CLOSING)
            request.outgoing.abort(reason)
        else:
            self._end(request)

    @bookkeeping
    def _end(self, request: PrefillRequest) -> None:
        self._release_features(request)
        self._unschedule(request)
        for sequence in request.sequences:
            self._blocks.free(sequence.block_table)
        self.num_missing_tokens -= request.num_counted_tokens
        self._admission.remove(request.request_id)
        self._requests.remove(request.request_id)

    def _release_features(self, request: PrefillRequest) -> None:
        """Items that have been released already are ignored."""
        for item_idx in range(len(request.request.prompt.media)):
            self._features.release((request.request_id, item_idx), has_ended=True)
