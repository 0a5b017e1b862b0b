"""Real engines and their transfer under a random order of everything that can happen to them, seed by seed.

    python -m tests.faults.stress 1000         that many runs, from seed 0 on
    python -m tests.faults.stress 1 2135       one run again

A run draws its cluster (sizes, codec of the KV, drafts, how much of a prompt travels, how long writes take)
and a few hundred events: requests, messages, steps, transfers, cancels, broken connections, dead processes,
failing transport operations, lost and late notifications, and time. While an engine is inside a model call,
time passes and everything else goes on. Then the world heals.

What must hold: every request ends, once, by the right tokens, an error or its client's leave. No model reads
foreign rows or KV. Nothing is held in the end.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.types.messages import FinishReason
from kv_transfer.agents.agent import PeerLostError, TransferError
from kv_transfer.agents.in_process import FaultScript
from tests.fakes.engines import MARGIN_S, TIMEOUT_S, Rig
from tests.fakes.relay import Relay, Story
from tests.fakes.requests import FIRST_TOKEN, make_item, make_request, make_video

NAMES = ("encoder", "prefill", "decode")
ITEMS = [make_item(name, num_rows) for name, num_rows in (("a", 3), ("b", 4), ("c", 9))]
ITEMS.append(make_video("long", 6))  # in two pieces
VERBS = ("connect", "post", "poll", "notify", "notifications")
PAUSES_S = (0.01, 0.5, 4.0, TIMEOUT_S, TIMEOUT_S + MARGIN_S + 1.0)


class Run:
    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        is_coded = rng.random() < 0.3
        num_blocks = rng.choice([60, 90]) if is_coded else rng.choice([20, 24, 40])
        self.rig = Rig(
            kv_blocks=num_blocks,
            decode_blocks=rng.choice([num_blocks, num_blocks + 20]),
            feature_blocks=rng.choice([4, 6, 9]),
            cache_blocks=rng.choice([4, 6]),
            codec="int8" if is_coded else "raw",
            step_tokens=40 if is_coded else 10,
        )
        self.max_tokens = 110 if is_coded else 14
        if rng.random() < 0.4:
            self.rig.draft = self._draft
        self.rig.network.faults.post_polls = rng.choice([0, 1, 2, 3, 12, 40])
        self.relay = Relay(self.rig)
        self.cut = rng.choice([0, 1, 2, 100, 100])
        self.hostility = rng.choice([0.0, 0.5, 1.0, 2.0])
        self.cancelled: set[str] = set()
        self._busy: set[str] = set()  # engines that are inside a call
        self.rig.mid_call = lambda: self._meanwhile("encoder")
        self.rig.mid_step = lambda: self._meanwhile("prefill")
        self.rig.mid_decode = lambda: self._meanwhile("decode")

    def play(self, num_events: int) -> None:
        with self.rig.cut_ends(self.cut):
            for _ in range(num_events):
                self._act()
            self.rig.network.faults = FaultScript()
            self.rig.mid_call = self.rig.mid_step = self.rig.mid_decode = lambda: None
            self._heal()
        self._check()
        self.relay.finish()
        assert len(set(self.rig.ended)) == len(self.rig.ended), "a request left decode twice"

    def _heal(self) -> None:
        for _ in range(8):
            self.relay.play(30)
            if not any(story.is_open for story in self.relay.stories.values()):
                return
            self.rig.clock.at += TIMEOUT_S
        raise AssertionError("a request waits for ever")

    def _check(self) -> None:
        for name, story in self.relay.stories.items():
            for line in story.lines:
                assert line.tokens == list(range(FIRST_TOKEN, FIRST_TOKEN + len(line.tokens))), name
                if story.error is None and name not in self.cancelled:
                    assert line.finish_reason is FinishReason.LENGTH, name
                    assert len(line.tokens) == story.request.stop.max_tokens, name
            self.counts[self._outcome(name, story)] += 1

    def _outcome(self, name: str, story: Story) -> str:
        if name in self.cancelled:
            return "cancelled"
        return "right" if story.error is None else "failed"

    def _act(self) -> None:
        rare = 0.006 * self.hostility
        events: list[tuple[float, Callable[[], object]]] = [
            (0.10, self._start),
            (0.18, lambda: self.relay.send_one(self._name())),
            (0.18, lambda: self.relay.hear_one(self._name())),
            (0.22, self._step),
            (0.16, lambda: self.rig.workers[self._name()].transfer_engine.step()),
            (0.06, self.rig.executor.run_one),
            (0.02, self._cancel),
            (0.04, self._play),
            (0.01 + rare, self._wait),
            (rare, self._cut),
            (rare, self._die),
            (2 * rare, self._break),
        ]
        (happen,) = self.rng.choices([e for _, e in events], [weight for weight, _ in events])
        happen()

    def _name(self) -> str:
        return self.rng.choice(NAMES)

    def _start(self) -> None:
        rng = self.rng
        name = f"r{len(self.relay.stories)}"
        items = rng.sample(ITEMS, rng.choice([0, 0, 1, 1, 2, 3]))
        num_choices, negative = rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 0, 5])
        num_tokens = rng.randint(1, self.max_tokens)
        request = make_request(name, num_tokens, items, rng.randint(1, 6), (), num_choices, negative)
        prefills_locally = not items and not negative and rng.random() < 0.2
        self.relay.start(request, items, prefills_locally=prefills_locally)
        self.counts["requests"] += 1

    def _step(self) -> None:
        name = self._name()
        if name not in self._busy:
            self.rig.workers[name].step()

    def _cancel(self) -> None:
        stories = [name for name, story in self.relay.stories.items() if story.is_open]
        if stories:
            name = self.rng.choice(stories)
            self.cancelled.add(name)
            self.relay.land(name)
            self.counts["cancels"] += 1

    def _play(self) -> None:
        if not self._busy:
            self.relay.play(self.rng.randint(1, 3))

    def _wait(self) -> None:
        self.rig.clock.at += self.rng.choice(PAUSES_S)
        self.counts["pauses"] += 1

    def _cut(self) -> None:
        self.relay.lose(self._name(), dies=False)
        self.counts["cuts"] += 1

    def _die(self) -> None:
        name = self._name()
        if name not in self._busy:
            self.relay.lose(name, dies=True)
            self.counts["deaths"] += 1

    def _break(self) -> None:
        faults, rng = self.rig.network.faults, self.rng
        self.counts["transport faults"] += 1
        nth = faults.num_notifications + rng.randint(1, 3)
        match rng.randrange(5):
            case 0:
                faults.drop(nth)
            case 1:
                faults.duplicate(nth)
            case 2:
                faults.delay(nth, rng.choice([1, 5, 40]))
            case _:
                verb, kind = rng.choice(VERBS), rng.choice([TransferError, PeerLostError])
                faults.fail(verb, faults._counts[verb] + rng.randint(1, 3), kind("scripted"))

    def _meanwhile(self, name: str) -> None:
        """Engine `name` is inside a call; its transfer thread, its event loop and all others go on."""
        self._busy.add(name)
        try:
            if self.rng.random() < 0.05 * self.hostility:
                self._wait()
            for _ in range(self.rng.randrange(4)):
                self._act()
        finally:
            self._busy.discard(name)

    def _draft(self, choice) -> list[int]:
        """Guesses, some of them wrong."""
        count = self.rng.randrange(4)
        return [choice.token_ids[-1] + 1 + i + (self.rng.random() < 0.2) for i in range(count)]


class _Raised(logging.Handler):
    """Errors that a thread's edge has caught and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


@contextmanager
def nothing_raised() -> Iterator[None]:
    logger, handler = logging.getLogger("kv_transfer"), _Raised()
    logger.addHandler(handler)
    was_propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_propagated
    for record in handler.found:
        assert record.exc_info and record.exc_info[1] is not None
        raise record.exc_info[1]


def run(seed: int) -> Counter[str]:
    """What happened. Raises AssertionError, with the seed."""
    made = Run(seed)
    try:
        with nothing_raised():
            made.play(made.rng.choice([100, 200, 400]))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    return made.counts


def main() -> None:
    num_runs, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + num_runs):
        try:
            counts += run(seed)
        except AssertionError as error:
            failures.append(str(error))
            if num_runs == 1:
                raise
    print(f"{num_runs} runs, {time.process_time():.0f} s of CPU: {dict(counts)}")
    for failure in failures:
        print(failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
