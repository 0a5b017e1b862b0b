"""An exception on an engine's thread, at the N-th of all calls that the engines make, for every N (`STRIDE`:
for some): the request that was handled fails by name, the others get their answers, nothing is held, and the
engines go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from cluster.engine import engine as language_engine
from cluster.engine import intake
from cluster.types.messages import Cancel
from cluster.worker.blame import UNEXPECTED
from tests.fakes.engines import Rig
from tests.fakes.faults import (
    MAX_TOKENS,
    Fault,
    errors,
    finish,
    has_answer,
    play_until_over,
    poison,
    start_all,
)
from tests.fakes.language_runner import prompts_in
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request
from tests.fakes.slow_params import often

STRIDE = 4  # every how many calls of a name one fails here, from the first; in the slow tests each of them


class Faults:
    """Names the calls in their order, and lets one of them fail."""

    def __init__(self, nth: int, error: Callable[[], BaseException] = Fault):
        """`nth`: 0, and none fails."""
        self._nth = nth
        self._error = error
        self._has_stopped = False
        self.calls: list[str] = []
        self.struck = ""  # the call that failed

    def stop(self) -> None:
        self._has_stopped = True

    def on(self, owner: Any, *names: str, behind: bool = False) -> None:
        """`behind`: the call is made, its result is lost."""
        for name in names:
            setattr(owner, name, self.failing(getattr(owner, name), name, behind))

    def failing(self, function: Callable[..., Any], name: str, behind: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._has_stopped:
                self.calls.append(name)
            if not self._has_stopped and len(self.calls) == self._nth:
                self.struck = name
                if behind:
                    function(*args, **kwargs)
                raise self._error()
            return function(*args, **kwargs)

        return call


Arm = Callable[[Rig, Faults], Any]


@contextmanager
def prefill_calls(rig: Rig, faults: Faults) -> Iterator[None]:
    engine = rig.prefill.engine
    faults.on(rig.models["prefill"], "positions")
    faults.on(engine.runner, "run", "first_tokens")
    faults.on(engine.blocks, "lookup", "try_allocate", "register")
    faults.on(rig.features, "ready_items")
    faults.on(rig.prefill.transfer_engine, "open")
    hashes = faults.failing(intake.BlockHashes, "BlockHashes")
    spans = faults.failing(intake.uncut_spans, "uncut_spans")
    send = faults.failing(language_engine.send_computed, "send_computed")
    with (
        patch.multiple(intake, BlockHashes=hashes, uncut_spans=spans),
        patch.object(language_engine, "send_computed", send),
    ):
        yield


@contextmanager
def prefill_results(rig: Rig, faults: Faults) -> Iterator[None]:
    """What is computed is lost: it has been written all the same, and part of it is on its way to decode."""
    faults.on(rig.runners["prefill"], "run", "first_tokens", behind=True)
    yield


@contextmanager
def decode_calls(rig: Rig, faults: Faults) -> Iterator[None]:
    engine = rig.decode.engine
    faults.on(engine.runner, "run", "propose", "first_tokens", "copy_blocks")
    faults.on(engine.blocks, "lookup", "allocate", "try_allocate", "register", "share", "generations")
    faults.on(rig.decode.transfer_engine, "grant")
    yield


@contextmanager
def decode_results(rig: Rig, faults: Faults) -> Iterator[None]:
    faults.on(rig.runners["decode"], "run", "propose", "first_tokens", "copy_blocks", behind=True)
    yield


@contextmanager
def encoder_calls(rig: Rig, faults: Faults) -> Iterator[None]:
    engine = rig.encoder.engine
    faults.on(engine.runner, "prepare", "encode")
    faults.on(rig.cache, "try_reserve", "write", "complete", "pin")
    faults.on(engine.planner, "part_of")
    faults.on(rig.encoder.transfer_engine, "open")
    yield


@contextmanager
def encoder_results(rig: Rig, faults: Faults) -> Iterator[None]:
    faults.on(rig.runners["encoder"], "prepare", "encode", behind=True)
    faults.on(rig.cache, "write", behind=True)
    yield


ALL_CALLS = (
    prefill_calls,
    prefill_results,
    decode_calls,
    decode_results,
    encoder_calls,
    encoder_results,
)


def run_with_fault(arm: Arm, nth: int) -> list[str]:
    """The names of all calls, of which the n-th failed. 0: none."""
    is_decode = arm in (decode_calls, decode_results)
    rig = Rig(
        decode_blocks=8 if is_decode else 40
    )  # a grant that is not given back is held until its time is over
    relay = Relay(rig, expects_faults=True)
    faults = Faults(nth)
    with arm(rig, faults):
        stories = start_all(relay)
        play_until_over(relay)
        lost = [story.request.request_id for story in stories if not has_answer(story)]
        assert rig.decode.engine.load().totals.num_preempted > 0 or faults.struck or not is_decode
        assert len(lost) <= 1, (faults.struck, lost, errors(relay))
        told = errors(relay)
        assert len(told) == len(lost), (faults.struck, lost, told)
        assert all(UNEXPECTED in text or "could not be encoded" in text for text in told), told
        faults.stop()
        finish(relay)
    assert len(rig.ended) == len(set(rig.ended))
    return faults.calls


@pytest.mark.parametrize("arm", ALL_CALLS, ids=lambda arm: arm.__name__)
@pytest.mark.parametrize("stride", often([1, STRIDE], [STRIDE]))
def test_a_fault_at_any_call_costs_at_most_the_request_that_was_handled(arm: Arm, stride: int) -> None:
    names, counts = run_with_fault(arm, 0), Counter[str]()
    for nth, name in enumerate(names, start=1):
        if counts[name] % stride == 0:
            assert run_with_fault(arm, nth)[nth - 1] == name
        counts[name] += 1
    assert len(names) > 10


# ------------------------------------------------------------------------------------- a request that fails
# every time


def of(request_id: str) -> Callable[..., bool]:
    """Whether a step, of either engine, computes something for the request."""

    def is_in(batch: Any, *_: Any) -> bool:
        return any(part.request_id == request_id for part in batch)

    return is_in


def holds(token_id: int) -> Callable[..., bool]:
    return lambda works, *_: any(token_id in work.sequence.prompt.token_ids for work in prompts_in(works))


@pytest.mark.parametrize(
    ("worker", "name", "lost"),
    [
        ("prefill", "run", "choices"),
        ("prefill", "first_tokens", "choices"),
        ("prefill", "run", "guided"),
        ("decode", "run", "choices"),
        ("decode", "propose", "text"),
    ],
)
def test_of_a_step_only_the_request_fails_that_fails_alone(worker: str, name: str, lost: str) -> None:
    """However often it comes back, for a request that is preempted fails under another name."""
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    poison(rig.workers[worker].engine.runner, name, of(lost))
    stories = start_all(relay)
    play_until_over(relay)
    assert [story.request.request_id for story in stories if not has_answer(story)] == [lost]
    assert errors(relay) == [UNEXPECTED]
    finish(relay)


def test_of_prompts_that_decode_computes_together_only_the_one_fails_that_fails_alone() -> None:
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    poison(rig.runners["decode"], "run", holds(101))  # the one that has two tokens before its last
    stories = [
        relay.start(make_request(f"r{n}", n, max_tokens=MAX_TOKENS), prefills_locally=True) for n in (0, 1, 2)
    ]
    play_until_over(relay)
    assert [has_answer(story) for story in stories] == [True, True, False]
    finish(relay)


def test_an_item_that_cannot_be_planned_fails_for_all_who_want_it_and_for_nobody_else() -> None:
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    poison(rig.encoder.engine.planner, "part_of", lambda item, _: item.media_hash == "a")
    items = [make_item(name, 3) for name in "aab"]
    stories = [
        relay.start(make_request(f"r{n}", 4 + n, [item], max_tokens=MAX_TOKENS), [item])
        for n, item in enumerate(items)
    ]
    play_until_over(relay)
    assert [has_answer(story) for story in stories] == [False, False, True]
    finish(relay)


def test_an_item_whose_start_fails_is_refused_by_name() -> None:
    rig = Rig()
    relay = Relay(rig, expects_faults=True)
    poison(rig.encoder.engine, "_refusal", lambda message: message.item.media_hash == "a")
    a, b = make_item("a", 3), make_item("b", 3)
    bad = relay.start(make_request("bad", 4, [a], max_tokens=MAX_TOKENS), [a])
    good = relay.start(make_request("good", 5, [b], max_tokens=MAX_TOKENS), [b])
    play_until_over(relay)
    assert bad.error == UNEXPECTED and has_answer(good)
    finish(relay)


def test_cancels_that_make_no_sense_cost_the_request_that_they_name() -> None:
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    stories = start_all(relay)
    while "text" not in rig.decode.engine.requests:
        relay.play(1)
    rig.receive("decode", Cancel("text", 7))
    play_until_over(relay)
    assert [story.request.request_id for story in stories if not has_answer(story)] == ["text"]
    finish(relay)
