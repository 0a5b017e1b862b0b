"""How requests go on: after a preemption, after the loss of a worker, and when a worker joins.

    resume    choices that were preempted go on in another attempt
    replay    an attempt has failed and another worker may succeed: what is left of it goes on in other
              attempts
    unplaced  what no worker can take now waits for one to join, within its request's deadlines

A resumed request has the tokens generated so far at the end of its prompt. Tokens are a function of prompt,
parameters, seed and position, so the reader gets those that it would have got, after a pause. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.errors import ClusterError, UnavailableError
from cluster.kvcache.hashing import block_hashes
from cluster.types.request import GenerateRequest
from router.flow.attempts import Attempts
from router.flow.context import FlowContext
from router.flow.state import Attempt, ClientRequest

logger = logging.getLogger(__name__)

# Of one choice. Losses of workers end its request sooner (`router.flow.quarantine`): this bounds the failures
# of workers that live.
MAX_REPLAYS = 5

MAX_UNPLACED = 1024  # works; requests beyond it fail at once. What has begun is always kept.


@dataclass(frozen=True, eq=False, slots=True)
class Unplaced:
    client: ClientRequest
    request: GenerateRequest  # the client's, or one for the rest of some of its choices
    choice_idxs: Sequence[int]  # the client's choice for each choice of `request`
    error: ClusterError  # why it could not be placed

    @property
    def has_begun(self) -> bool:
        """An attempt has been made: admission has let the request in."""
        return self.client.num_attempts > 0


class UnplacedTable:
    def __init__(self) -> None:
        self._works: list[Unplaced] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Unplaced) -> None:
        """Raises the work's error if too many requests wait."""
        if not work.has_begun and len(self) >= MAX_UNPLACED:
            raise work.error
        self._works.append(work)

    def take_all(self) -> Sequence[Unplaced]:
        works, self._works = self._works, []
        return works

    def forget(self, client: ClientRequest) -> None:
        """Nothing of the request is wanted any more."""
        self._works = [work for work in self._works if work.client is not client]

    def error_of(self, client: ClientRequest) -> ClusterError | None:
        """Why the request waits here; None: it does not."""
        return next((work.error for work in self._works if work.client is client), None)


class Continuation:
    def __init__(self, context: FlowContext, attempts: Attempts):
        self._context = context
        self._placer = context.placer
        self._attempts = attempts
        self.unplaced = UnplacedTable()
        self.num_replays = 0  # failed attempts that others took over from, since the start

    def resume(self, attempt: Attempt, choice_idxs: Sequence[int], now: float) -> None:
        """`choice_idxs`: of the attempt; their tokens are equal."""
        client = attempt.client
        request_id = f"{client.request_id}.{client.num_attempts}"
        token_ids = tuple(attempt.choices[choice_idxs[0]].token_ids)
        client_idxs = [attempt.choice_idxs[idx] for idx in choice_idxs]
        client.count_attempt()
        try:
            rest = attempt.request.resumed(request_id, choice_idxs, token_ids)
        except Exception as error:  # it concerns these choices alone
            return self._context.fail_choices(client, client_idxs, error)
        self.start(client, rest, client_idxs, now)

    def replay(self, attempt: Attempt, error: ClusterError, now: float) -> None:
        """Choices without a token go on together, each other one by itself. If a worker is blamed, each of
        them has had one loss more. Choices that one worker's end interrupts in several attempts do not add
        up: how often a choice may go on does not depend on how many others its request has."""
        client, choices = attempt.client, attempt.choices
        left = [idx for idx, choice in enumerate(choices) if choice.is_open and not choice.is_complete]
        if not left:
            return
        if attempt.blamed:
            client.avoided |= {worker.replica_id for worker in attempt.blamed}
            client_idxs = [attempt.choice_idxs[idx] for idx in left]
            if attempt.num_losses >= MAX_REPLAYS:
                return self._context.fail_choices(client, client_idxs, error)
            for idx in client_idxs:
                client.choices[idx].num_losses += 1
            self.num_replays += 1
        logger.info("request %s goes on elsewhere: %s", client.request_id, error)
        fresh = [idx for idx in left if not choices[idx].token_ids]
        for group in filter(None, (fresh, *([idx] for idx in left if idx not in fresh))):
            self.resume(attempt, group, now)

    def start(
        self, client: ClientRequest, rest: GenerateRequest, choice_idxs: Sequence[int], now: float
    ) -> None:
        """An attempt for the rest of these choices of the client; without a worker, the rest waits for
        one."""
        try:
            self._attempts.check_barred(client, now)
            request = msgspec.structs.replace(rest, waited_s=client.waited_s(now))
            hashes = block_hashes(request.prompt, self._placer.block_size)
            view, decision = self._placer.decide(client, request, hashes, now)
            self._attempts.start(client, request, choice_idxs, view, decision, now)
        except UnavailableError as error:
            for idx in choice_idxs:
                client.choices[idx].go_on_in(None)
            self.unplaced.add(Unplaced(client, rest, choice_idxs, error))
        except Exception as error:  # it concerns these choices alone
            self._context.fail_choices(client, choice_idxs, error)
