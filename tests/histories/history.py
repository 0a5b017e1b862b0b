"""One history: a seed decides the cluster, its requests, every delay and every fault.

    draw → play (requests and faults) → heal → everything ends within a bound → nothing is held

`play(seed)` raises `HistoryError`, which names the seed, what is violated, and how to see it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from cluster.engine import kv_output
from cluster.errors import OverloadedError, OverwrittenError, QuarantinedError, UnavailableError
from cluster.types.members import Role
from router.flow import watch
from router.flow.continuation import MAX_REPLAYS
from tests.histories.clients import draw_request, next_turn
from tests.histories.doors import REQUEST_S, SimulatedDoor
from tests.histories.faults import KINDS, Faults
from tests.histories.lookout import Lookout
from tests.histories.model import BLOCK_SIZE
from tests.histories.oracle import FORGET_S, check_answers, check_budgets, check_ledgers
from tests.histories.workers import Sizes
from tests.histories.world import Shape, World

MAX_EVENTS = 40_000  # a long history has 4,000
CHECK_EVERY = 24  # events between two looks at the budgets
FOCUSED = 0.25  # of the histories have one kind of fault, many times, in a cluster where it may do harm
TURNS, TURN_S = 0.25, 0.08  # of the requests have a next one, with their answer in the prompt, soon after
# Faults that keep no worker away for long
QUICK = {
    "cancels",
    "cuts",
    "kills",
    "strikes",
    "assignments",
    "transport faults",
    "doubled notifications",
    "drains",
    "door kills",
    "slow disks",
}
MOVE_S = 3.0  # a request leaves a silent worker in time for its deadline
CALM_S = 6.0  # after the last request: if nothing has gone wrong, everything has ended
END_S = REQUEST_S + 3.0  # after the last fault: every request has ended
LEDGER_S = END_S + 20.0  # … and nothing is held any more

CLASSES = (
    AdmissionClassArgs(name="interactive", max_priority=0, weight=8.0, max_wait_s=3.0),
    AdmissionClassArgs(name="batch", max_wait_s=5.0),
)
E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
L, EP, W = Role.LANGUAGE, Role.ENCODE_PREFILL, Role.WHOLE
CLUSTERS = (
    (E, P, D), (E, P, D, D), (E, E, P, P, D, D), (E, E, P, D), (E, P, P, D), (E, P, D), (E, L), (E, L, L),
    (E, P, L, D), (EP, D), (E, EP, D), (EP, EP, D, D), (EP, L), (W,), (W, W), (W, W, W), (E, W), (W, D),
    (E, P, D, W), (E, P, D, L, EP, W),
)  # fmt: skip
# For faults that do harm only if others take the memory that a writer has lost
CROWDED = ((E, P, P, D), (E, E, P, P, D, D), (E, L, L), (EP, EP, D, D), (W, W), (W, W, W))
CROWDING = {"late writes", "late grants", "hung engines", "stops", "strikes"}


class HistoryError(AssertionError):
    def __init__(self, seed: int, world: World, error: BaseException):
        self.seed, self.world = seed, world
        super().__init__(
            f"seed {seed}: {error or repr(error)}\n"
            f"    see it again: python -m tests.histories run {seed} --trace"
        )


class History:
    def __init__(self, seed: int, focus: str = ""):
        """`focus`: the only kind of fault; empty: the seed decides."""
        self.seed, self.rng = seed, Random(seed)
        rng = self.rng
        drawn = rng.choice(list(KINDS)) if rng.random() < FOCUSED else ""
        self.focus = focus or drawn
        self.hostility = rng.choice([0, 1, 2, 4, 8])
        self.is_tight = rng.random() < 0.15
        self.world = World(rng, self._shape())
        self.faults = Faults(self.world, rng, self._submit)
        self.lookout = Lookout(self.world)
        self._num_requests = 0
        self.cut_blocks = rng.choice([1, 2]) if rng.random() < 0.15 else None
        if self.world.sizes.state_blocks:
            self.cut_blocks = None  # decode computes no end of a prompt
        self._num_events = 0
        self.world.scheduler.after_event = self._after_event

    def _shape(self) -> Shape:
        rng = self.rng
        sizes = Sizes(
            kv_blocks=rng.choice([20, 24, 32, 60]),
            feature_blocks=rng.choice([4, 6, 9]),
            cache_blocks=rng.choice([4, 6, 9]),
            step_tokens=rng.choice([8, 12, 40]),
            max_sequences=rng.choice([2, 4, 8]),
            tier_bytes=1 << 14 if rng.random() < (0.8 if self.focus == "slow disks" else 0.12) else 0,
            window=rng.choice([6, 12]) if rng.random() < 0.08 else None,
            is_warm=Random(f"{self.seed} is warm").random() < 0.5,
        )
        outstanding_s = rng.choice([0.004, 0.02]) if self.is_tight else 1e9
        shape = Shape(
            rng.choice(CROWDED if self.focus in CROWDING else CLUSTERS),
            num_doors=rng.choice([1, 1, 2]),
            sizes=sizes,
            admission=AdmissionArgs(
                classes=CLASSES, max_outstanding_s=outstanding_s, max_queued=3 if self.is_tight else 100
            ),
            is_one_host=rng.random() < 0.6,
            drafts=rng.choice([0.0, 0.0, 0.7]),
            scattered=rng.choice([0.0, 0.0, 0.5, 1.0]),
            overcommit=rng.choice([1, 1, 4]),
            skew=rng.random() < 0.5,
        )
        states = Random(f"{self.seed} states")
        if states.random() < 0.2:  # what is not served with states is off
            state_blocks, drafts = states.choice([1, 2]), states.choice([0.0, 0.7])
            kv_blocks = sizes.kv_blocks + (12 if sizes.tier_bytes else 44) * state_blocks
            sizes = replace(sizes, state_blocks=state_blocks, kv_blocks=kv_blocks, window=None)
            shape = replace(shape, sizes=sizes, drafts=drafts)
        runs_ahead = Random(f"{self.seed} runs ahead").random() < 0.5
        return replace(shape, sizes=replace(sizes, runs_ahead=runs_ahead))

    def run(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        with alone() as errors, self.world.lease_ids(), cut_ends(self.cut_blocks), sooner_moves():
            failure: Exception | None = None
            try:
                counts = self._play()
            except Exception as error:
                failure = error
            if errors:  # it came first
                cause = _cause(errors[0])
                failure = AssertionError(f"an error was logged: {errors[0].getMessage()}: {cause!r}")
                failure.__cause__ = cause
            if failure is not None:
                raise HistoryError(self.seed, self.world, failure) from failure
        counts += self._seen()
        counts["histories at depth 1"] = int(self.world.sizes.runs_ahead)
        counts["histories with states"] = int(self.world.sizes.state_blocks > 0)
        if self.world.sizes.runs_ahead:
            counts["histories at depth 1 with states"] = counts["histories with states"]
            counts["histories at depth 1 with forced tokens"] = int(self.world.shape.drafts > 0)
        return +counts

    def trace_lines(self) -> Iterator[str]:
        for at, who, what in self.world.scheduler.trace:
            yield f"{at:10.4f}  {who:24} {what}"

    def _play(self) -> Counter[str]:
        rng, scheduler = self.rng, self.world.scheduler
        last_s = rng.choice([0.03, 0.1, 0.4]) if self.world.shape.overcommit == 1 else 0.03
        num_requests = rng.randint(2, 7) + (6 if self.world.sizes.tier_bytes else 0)
        for _ in range(num_requests):
            scheduler.at(0.05 + rng.uniform(0.0, last_s), None, "", self._submit)
        num_faults = rng.randint(1, 6) if self.focus else rng.randint(0, self.hostility)
        self.faults.plan(num_faults, 0.05 + 1.5 * last_s, self.focus)
        while scheduler.next_at is not None and scheduler.next_at <= self.faults.ends_at:
            scheduler.run_next()
        scheduler.run_until(self.faults.ends_at)
        self.faults.clear()
        return self._end()

    def _end(self) -> Counter[str]:
        world, scheduler = self.world, self.world.scheduler
        healed_at = scheduler.now
        is_calm = set(self.faults.counts) <= {"cancels"}
        if is_calm:  # then nothing has to wait for a time to pass
            scheduler.run_until(healed_at + CALM_S)
            check_ledgers(world)
        scheduler.run_until(healed_at + END_S)
        late = [name for name, story in world.clients.stories.items() if not story.is_over]
        assert not late, f"these requests wait for ever: {late}"
        counts = check_answers(world, self._allowed_errors())
        scheduler.run_until(healed_at + LEDGER_S)
        assert not (world.num_expired and self._all_is_known()), "a lease waited for its time"
        if not self.faults.counts["lost notifications"] and not self.faults.counts["silent transport faults"]:
            world.check_late_words()
        self.lookout.is_over = True
        scheduler.run_until(healed_at + FORGET_S)
        world.wake_all()
        scheduler.run_until(scheduler.now + 1.0)
        check_ledgers(world)
        return counts + self.faults.counts

    def _all_is_known(self) -> bool:
        """Nothing that has happened can keep from the owner of blocks that nothing writes to them."""
        counts = self.faults.counts
        knows_ends = self.world.shape.is_one_host or not counts["kills"]
        # A writer whose request was cancelled connects for its last word alone.
        has_said = not self.world.transfers.faults.num_failed_connects
        # No door dials a worker again that is listed no more.
        dials_again = not (counts["drains"] and counts["cuts"])
        return set(counts) <= QUICK - {"door kills"} and knows_ends and has_said and dials_again

    def _allowed_errors(self) -> tuple[type[Exception], ...]:
        """What a client may be told. What is lost goes on elsewhere, so an error has a reason: the cluster is
        small, a worker was unavailable for long, or the same request was in work at two that were lost."""
        counts = self.faults.counts
        allowed: set[type[Exception]] = set()
        num_lost = counts["kills"] + counts["cuts"]
        if self.is_tight or counts["slow disks"] or num_lost > 1:  # admission waits for 3 s, workers for 2 s
            allowed.add(OverloadedError)
        if self.world.num_waited_for:  # until then the blocks were fenced
            allowed |= {OverloadedError, UnavailableError}
        if (
            not set(counts) <= QUICK
            or num_lost + counts["transport faults"] + counts["drains"] > MAX_REPLAYS - 1
        ):
            allowed |= {OverloadedError, UnavailableError}
        if num_lost > 1 or not set(counts) <= QUICK:
            allowed.add(QuarantinedError)
        if not set(counts) <= QUICK:
            allowed.add(OverwrittenError)
        return tuple(allowed)

    def _seen(self) -> Counter[str]:
        """What a history is worth: the rare ways that it has gone."""
        world, counts = self.world, Counter[str]()
        counts["events"] = world.scheduler.num_events
        counts["writes that came late"] = world.num_late_writes
        counts["media computed at decode"] = world.num_media_at_decode
        for worker in world.live_workers:
            if worker.language is not None:
                load = worker.language.engine.load()
                counts["preempted"] += load.totals.num_preempted
                counts["loaded from the tier"] += load.tier.num_loaded
                counts["late words"] += load.received.num_late
        counts += world.network.num_heard
        return counts

    def _submit(self) -> None:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        door = self.rng.choice(self.world.doors) if self.world.doors else None
        if door is None:
            return
        while True:
            request, items = draw_request(self.rng, request_id, 9 if self.world.shape.overcommit == 1 else 28)
            if self._fits(request):
                break
        door.later(0.0, self._submit_at, door, request, items)
        if self.rng.random() < TURNS:
            turn = next_turn(self.rng, f"{request_id}-next", request)
            if self._fits(turn):
                door.later(self.rng.uniform(0.0, TURN_S), self._submit_at, door, turn, items)

    def _fits(self, request: Any) -> bool:
        """Whether a worker can hold the request at all; what is larger is refused."""
        sizes = self.world.sizes
        return request.max_blocks(BLOCK_SIZE, state_blocks=sizes.state_blocks) <= sizes.kv_blocks

    def _submit_at(self, door: SimulatedDoor, request: Any, items: Any) -> None:
        self.world.scheduler.note(door.name, f"submit {describe_request(request)}")
        self.world.clients.submit(door, request, items)

    def _after_event(self) -> None:
        self._num_events += 1
        assert self._num_events < MAX_EVENTS, "it never comes to rest"
        if self._num_events % CHECK_EVERY == 0:
            check_budgets(self.world)


def describe_request(request: Any) -> str:
    media = ",".join(item.media_hash for item in request.prompt.media)
    guided = "" if request.guidance is None else f" guided {len(request.guidance.negative_prompt.token_ids)}"
    return (
        f"{request.request_id}: {len(request.prompt.token_ids)} tokens [{media}] n={len(request.sampling)} "
        f"max={request.stop.max_tokens}{guided}"
    )


def play(seed: int, focus: str = "") -> Counter[str]:
    """What happened, counted. Raises HistoryError."""
    return History(seed, focus).run()


def _cause(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


class _Raised(logging.Handler):
    """Errors that a thread's edge has caught and logged: every one is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


@contextmanager
def alone() -> Iterator[list[logging.LogRecord]]:
    """What the product logs is collected, not printed."""
    handler = _Raised()
    loggers = [logging.getLogger(name) for name in ("cluster", "router", "kv_transfer", "encoder_service")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield handler.found
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def sooner_moves() -> Any:
    return patch.object(watch, "MOVE_S", MOVE_S)


@contextmanager
def cut_ends(num_blocks: int | None) -> Iterator[None]:
    """At most `num_blocks` of a prompt travel, and those of its media; decode computes the others."""

    def plan_end(request: Any, *_: Any) -> None:
        cut = max(num_blocks or 0, -(-request.main.prompt.media_end // BLOCK_SIZE)) * BLOCK_SIZE
        if cut < request.main.num_prompt_tokens:
            request.main.leave_to_receiver(cut)

    with ExitStack() as stack:
        if num_blocks is not None:
            stack.enter_context(patch.object(kv_output, "plan_end", plan_end))
        yield
