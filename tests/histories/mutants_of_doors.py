"""Planted bugs of doors: as in `mutants.py`."""

from __future__ import annotations

from typing import Any

from cluster.types.messages import Cancel, DecodeGranted, FeatureGranted
from cluster.types.request import GenerateRequest
from router.admission.controller import AdmissionController
from router.flow.attempts import Attempts
from router.flow.media import MediaFlow
from router.flow.request_flow import RequestFlow
from router.flow.state import Attempt, ChoiceState
from router.members import Peer
from router.policy.cluster import ClusterView
from router.policy.pool import WorkerPool
from tests.histories.mutants import Change, nothing


def grant_not_returned() -> Change:
    """A grant that comes after its request has ended is kept."""
    handle = RequestFlow._on_worker_message

    def keeps(self: RequestFlow, worker: Any, message: Any, now: float) -> None:
        if not isinstance(message, DecodeGranted | FeatureGranted):
            handle(self, worker, message, now)

    return RequestFlow, "_on_worker_message", keeps


def first_token_twice() -> Change:
    arrived = ChoiceState.arrived

    def twice(self: ChoiceState, event: Any, is_first: bool) -> Any:
        return (event, *arrived(self, event, is_first)) if is_first else arrived(self, event, is_first)

    return ChoiceState, "arrived", twice


def early_tokens_lost() -> Change:
    """Decode's tokens that overtake the first one are dropped."""
    arrived = ChoiceState.arrived

    def loses(self: ChoiceState, event: Any, is_first: bool) -> Any:
        if is_first:
            self._early = []
        return arrived(self, event, is_first)

    return ChoiceState, "arrived", loses


def resumed_one_token_back() -> Change:
    """The last token before a preemption is generated, and told, again."""
    resumed = GenerateRequest.resumed

    def back(self: Any, request_id: str, choice_idxs: Any, token_ids: Any) -> Any:
        return resumed(self, request_id, choice_idxs, token_ids[:-1])

    return GenerateRequest, "resumed", back


def charge_kept() -> Change:
    return WorkerPool, "discharge", nothing


def in_flight_kept() -> Change:
    return ClusterView, "ended", nothing


def admission_kept() -> Change:
    return AdmissionController, "leave", nothing


def lost_worker_unnoticed() -> Change:
    return Attempts, "on_lost", nothing


def deadline_ignored() -> Change:
    return RequestFlow, "_end_overdue", nothing


def landed_without_cancel() -> Change:
    """Workers are not told that a request is over."""

    def quiet(self: Attempts, attempt: Any, now: float) -> None:
        land(self, attempt, now)
        for output in self._context.take_outputs():
            if not isinstance(getattr(output, "message", None), Cancel):
                self._context.put(output)

    land = Attempts._land
    return Attempts, "_land", quiet


def suspect_held_for_ever() -> Change:
    """An item that waits for another suspect is forgotten."""

    def forgets(self: MediaFlow, attempt: Any, item_idx: int, now: float) -> None:
        encoder = attempt.media[item_idx].encoder
        if self._suspects.get(encoder) == (attempt, item_idx):
            del self._suspects[encoder]

    return MediaFlow, "_release", forgets


def needs_no_worker() -> Change:
    """The loss of the worker that computes a prompt ends no attempt."""
    needs = Attempt.needs
    return Attempt, "needs", lambda self, worker: needs(self, worker) and worker is self.decode


def drained_worker_kept() -> Change:
    return Attempts, "check_drained", nothing


def gone_without_a_word() -> Change:
    """The door does not say what it has read when it closes a connection."""
    return Peer, "say_goodbye", nothing


def losses_add_up() -> Change:
    """How often a choice may go on depends on its request's other choices."""
    of_all = property(lambda self: sum(choice.num_losses for choice in self.client.choices))
    return Attempt, "num_losses", of_all


def moved_item_not_called_off() -> Change:
    """An item that was encoded, and moves because its encoder is lost, is not called off where it goes."""
    move = MediaFlow._move

    def forgets(self: MediaFlow, attempt: Any, item_idx: int, error: Any, now: float) -> None:
        was_encoded = item_idx not in attempt.unencoded
        move(self, attempt, item_idx, error, now)
        if was_encoded:
            attempt.unencoded.discard(item_idx)

    return MediaFlow, "_move", forgets


def former_encoder_heard() -> Change:
    """What an encoder sends after its item has moved counts as the item's end."""

    def hears(self: Attempts, attempt: Any, worker: Any, message: Any, now: float) -> None:
        on_encoded(self, attempt, attempt.media[message.item_idx].encoder, message, now)

    on_encoded = Attempts._on_encoded
    return Attempts, "_on_encoded", hears


ALL = (
    grant_not_returned, first_token_twice, early_tokens_lost, resumed_one_token_back, charge_kept,
    in_flight_kept, admission_kept, lost_worker_unnoticed, deadline_ignored, landed_without_cancel,
    suspect_held_for_ever, needs_no_worker, drained_worker_kept, gone_without_a_word, losses_add_up,
    moved_item_not_called_off, former_encoder_heard,
)  # fmt: skip
