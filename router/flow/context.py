"""What all parts of a door's request flow share: the workers, what is to be done, and how one attempt fails.

Owned by `RequestFlow`, which lets workers join and leave. Its parts (attempts, their media, continuation)
send and deliver through it, so that none of them calls the part that owns it. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cluster.errors import ClusterError, OverwrittenError, UnavailableError, to_known
from cluster.isolation import Isolated
from cluster.types.members import Member
from cluster.types.messages import (
    AnyMessage,
    DecodeTarget,
    EncodeTarget,
    GrantPassed,
    ReturnGrant,
    TokenEvent,
)
from cluster.types.transfer import Grant
from router.flow.outputs import Deliver, Output, Send
from router.flow.placer import Placer
from router.flow.quarantine import Quarantine
from router.flow.state import Attempt, ClientRequest, WorkerState

logger = logging.getLogger(__name__)


class FlowContext:
    def __init__(self, placer: Placer, first_token_timeout_s: float):
        self.placer = placer
        self.cluster = placer.cluster
        self.timeout_s = first_token_timeout_s
        self.quarantine = Quarantine()
        self.workers: dict[str, WorkerState] = {}  # that are connected, by replica id
        self.num_crashed = 0  # requests that an error of this door has ended
        self._outputs: list[Output] = []

    def join(self, member: Member) -> WorkerState:
        worker = self.workers[member.replica_id] = WorkerState(member)
        return worker

    def leave(self, replica_id: str) -> WorkerState | None:
        worker = self.workers.pop(replica_id, None)
        if worker is not None:
            worker.is_lost = True
        return worker

    # What is to be done

    def put(self, output: Output) -> None:
        self._outputs.append(output)

    def take_outputs(self) -> Sequence[Output]:
        """In order, since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def send(self, worker: WorkerState, message: AnyMessage, attempt: Attempt) -> None:
        if not worker.is_lost:
            self.put(Send(worker.replica_id, message, attempt.request_id))

    def pass_on(
        self,
        attempt: Attempt,
        owner: WorkerState,
        writer: WorkerState,
        target: DecodeTarget | EncodeTarget,
    ) -> None:
        """The owner's grant goes to the writer, and the owner is told so: sooner or later, whether it is
        connected now or not."""
        request_id = attempt.request_id
        passed = GrantPassed(target.grant.lease_id, writer.member.processes)
        self.put(Send(writer.replica_id, target, request_id, owner.replica_id))
        self.put(Send(owner.replica_id, passed, request_id))

    def return_grant(self, owner: WorkerState, grant: Grant) -> None:
        """No writer was given the grant: the owner is told likewise."""
        self.put(Send(owner.replica_id, ReturnGrant(grant.lease_id)))

    def deliver(self, client: ClientRequest, choice_idx: int, event: TokenEvent | ClusterError) -> None:
        """The next event of a choice, or the error that ends it, goes to its reader, if it has one."""
        if client.takes(choice_idx, event):
            self.put(Deliver(client.request_id, choice_idx, event))

    def answer(self, attempt: Attempt, choice_idx: int, event: TokenEvent | ClusterError) -> None:
        """As `deliver`, for a choice of an attempt."""
        if attempt.choices[choice_idx].is_open:
            self.deliver(attempt.client, attempt.choice_idxs[choice_idx], event)

    # Failures

    def fail(self, attempt: Attempt, error: ClusterError, *blamed: WorkerState) -> None:
        """Every choice that has not ended gets the error, unless another attempt may go on with it.
        `Attempts.advance` lands the attempt. `blamed`: may have caused it; if none is named, prompt worker
        and decode."""
        if attempt.has_failed:
            return
        is_lost = isinstance(error, OverwrittenError) and any(c.token_ids for c in attempt.choices)
        if isinstance(error, UnavailableError | OverwrittenError) and not is_lost:
            return attempt.fail(error, blamed or (attempt.prompt_worker, attempt.decode))
        attempt.fail()
        for choice_idx in range(len(attempt.choices)):
            self.answer(attempt, choice_idx, error)

    def fail_choices(self, client: ClientRequest, choice_idxs: Sequence[int], error: Exception) -> None:
        known = self.known(error)
        for choice_idx in choice_idxs:
            self.deliver(client, choice_idx, known)

    def isolated(self, attempt: Attempt) -> Isolated:
        """The block acts for this attempt: an exception fails it. `Attempts.advance` follows."""
        return Isolated(lambda error: self.fail(attempt, self.known(error)))

    def known(self, error: Exception) -> ClusterError:
        """What the client is told. An error of this door itself is logged and counted."""
        if not isinstance(error, ClusterError):
            self.num_crashed += 1
            logger.error("a request ended because of an error in this door", exc_info=error)
        return to_known(error)


def logged() -> Isolated:
    """An exception of the block concerns no request that goes on, and is logged."""
    return Isolated(lambda error: logger.error("an error in this door", exc_info=error))
