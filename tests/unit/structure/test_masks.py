"""No step waits for a mask: threads are moved by hand, and time is scripted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.errors import StructureError
from cluster.structure import masks as filling
from cluster.structure import matcher as limits
from cluster.structure.masks import MaskFiller
from cluster.structure.matcher import Effort, Matcher
from tests.fakes.structures import allowed, demo_vocabulary, ids_of, matcher_of, of_regex
from tests.fakes.workers import Inbox, ManualExecutor


class Bench:
    def __init__(self) -> None:
        self.executor, self.aside, self.inbox = ManualExecutor(), ManualExecutor(), Inbox()
        self.filler = MaskFiller(self.executor, self.aside)
        self.filler.attach(self.inbox.call)

    def start(self, *matchers: Matcher) -> None:
        self.filler.start([(matcher, ()) for matcher in matchers], demo_vocabulary().num_words)

    def run(self, executor: ManualExecutor) -> None:
        while executor.jobs:
            executor.run_one()
        self.inbox.run()


class Timer:
    """Each call is later by the next of these."""

    def __init__(self, *took_s: float):
        self._steps: Iterator[float] = (each for took in took_s for each in (0.0, took))
        self._now = 0.0

    def __call__(self) -> float:
        self._now += next(self._steps, 0.0)
        return self._now


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "GRACE_S", 0.0)


def masked(pattern: str = "[0-9]+") -> Matcher:
    matcher = matcher_of(of_regex(pattern))
    matcher.make_mask()
    return matcher


def test_a_late_mask_holds_up_its_own_choice_only():
    bench, late, known = Bench(), matcher_of(of_regex("[a-c]+")), masked()
    bench.start(late, known)
    masks, late_idxs = bench.filler.take()
    assert late_idxs == {0} and known.mask is not None and (masks[1] == known.mask).all()
    assert not bench.filler.may_draw(late) and bench.filler.may_draw(known)
    other = matcher_of(of_regex("[d-f]+"))
    bench.start(late, other)  # the array of the late mask is not the next step's
    bench.run(bench.executor)
    masks, late_idxs = bench.filler.take()
    assert late_idxs == {0} and bench.filler.may_draw(late)
    assert late.mask is not None and allowed(late) == allowed(masked("[a-c]+"))
    assert (masks[1] == masked("[d-f]+").mask).all()


def test_a_slow_matcher_has_its_masks_before_its_steps():
    bench, slow = Bench(), matcher_of(of_regex("[0-9]+"))
    slow.is_slow = True
    assert slow.drafts(ids_of("1"), 8) == []
    slow.effort.timer = Timer(1.5 * limits.SLOW_S, 0.0)
    assert not bench.filler.may_draw(slow) and not bench.filler.may_draw(slow)
    assert len(bench.aside.jobs) == 1 and not bench.executor.jobs
    bench.run(bench.aside)
    assert bench.filler.may_draw(slow) and slow.is_slow
    bench.start(slow)
    assert not bench.filler.take()[1] and not bench.executor.jobs
    slow.accept(ids_of("1")[0])
    assert not bench.filler.may_draw(slow)
    bench.run(bench.aside)
    assert bench.filler.may_draw(slow) and not slow.is_slow


def test_a_matcher_at_a_limit_fails_without_the_step():
    bench, good = Bench(), matcher_of(of_regex("[0-9]+"))
    bad = matcher_of(of_regex("a+"))
    bad.native.consume_token(ids_of("1")[0])
    bench.start(bad, good)
    bench.run(bench.executor)
    masks, late = bench.filler.take()
    assert late == {0} and (masks[1] == masked().mask).all() and bench.filler.may_draw(good)
    with pytest.raises(StructureError) as raised:
        bench.filler.may_draw(bad)
    assert raised.value.status == 400


def test_a_step_that_failed_is_not_waited_for():
    bench, matcher = Bench(), matcher_of(of_regex("[0-9]+"))
    bench.start(matcher)
    bench.start(matcher)
    assert bench.filler.take()[1] == {0} and len(bench.executor.jobs) == 1
    bench.run(bench.executor)
    assert bench.filler.may_draw(matcher) and matcher.mask is not None


def test_a_mask_that_cannot_be_filled_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    bench, matcher = Bench(), matcher_of(of_regex("[0-9]+"))
    matcher.is_slow = True
    monkeypatch.setattr(matcher, "make_mask", lambda: 1 / 0)
    assert not bench.filler.may_draw(matcher)
    bench.run(bench.aside)
    with pytest.raises(Exception, match="log"):
        bench.filler.may_draw(matcher)


def test_all_masks_of_a_request_have_one_budget():
    timer = Timer(*[0.9 * limits.MAX_MASK_S] * 200)
    one = matcher_of(of_regex("[0-9]+")).copy(effort=Effort(timer))
    other = one.copy()
    num_masks = 0
    with pytest.raises(StructureError, match="too complex"):
        while num_masks < 200:
            (one, other)[num_masks % 2].make_mask()
            num_masks += 1
    assert num_masks == int(limits.MAX_ASIDE_S / (0.9 * limits.MAX_MASK_S))


def test_one_mask_has_a_budget():
    matcher = matcher_of(of_regex("[0-9]+")).copy(effort=Effort(Timer(1.1 * limits.MAX_MASK_S)))
    with pytest.raises(StructureError, match="too complex"):
        matcher.make_mask()


def test_what_steps_wait_for_has_a_budget_and_quick_tokens_cost_nothing():
    quick = matcher_of(of_regex("[0-9]+")).copy(effort=Effort(Timer(*[0.5 * limits.SLOW_S] * 1000)))
    (digit,) = ids_of("1")
    for _ in range(1000):
        quick.accept(digit)
    assert not quick.is_slow
    slow = matcher_of(of_regex("[0-9]+")).copy(effort=Effort(Timer(*[10 * limits.SLOW_S] * 1000)))
    num_tokens = 0
    with pytest.raises(StructureError, match="too complex"):
        while num_tokens < 1000:
            slow.accept(digit)
            num_tokens += 1
    assert slow.is_slow and num_tokens == int(limits.MAX_IN_STEPS_S / (10 * limits.SLOW_S))
