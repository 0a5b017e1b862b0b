"""What ends an engine, so that its worker is replaced, and what does not: a device that is lost or on which
nothing succeeds, a process without memory, books that cannot be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.errors import BookkeepingError
from cluster.lost_device import DeviceLostError
from cluster.types.messages import StartEncode
from tests.fakes.engines import Rig
from tests.fakes.faults import Fault, errors, play_until_over, poison, start_all
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request

STEPS = (
    ("prefill", "run"),
    ("prefill", "first_tokens"),
    ("decode", "run"),
    ("decode", "first_tokens"),
    ("encoder", "encode"),
)


def play_with(worker: str, name: str, error: Callable[[], BaseException], probe_fails: bool = False) -> Relay:
    """Every such call raises."""
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)

    def call(*_: Any) -> Any:
        raise error()

    runner = rig.workers[worker].engine.runner
    setattr(runner, name, call)
    if probe_fails:
        runner.warm_up_prompt = call
    start_all(relay)
    play_until_over(relay)
    return relay


OF_TRITON = "Triton Error [CUDA]: an illegal memory access was encountered"


@pytest.mark.parametrize(("worker", "name"), [*STEPS, ("encoder", "prepare")])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError,
        DeviceLostError,
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS"),
        lambda: RuntimeError(OF_TRITON),
    ],
)
def test_a_lost_device_ends_the_engine(worker: str, name: str, error: Callable[[], BaseException]) -> None:
    with pytest.raises(type(error())):
        play_with(worker, name, error)


def test_what_a_failed_step_has_enqueued_ends_before_its_blocks_are_free() -> None:
    """They may be leased at once, and the device does not wait for another worker's write."""
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    engine = rig.workers["prefill"].engine
    run, waits = engine.runner.run, []

    def failing(works: Any, *args: Any) -> Any:
        if any(work.request_id == "text" for work in works):
            raise Fault
        return run(works, *args)

    engine.runner.run = failing
    engine.runner.drop_ahead = lambda: waits.append("text" in engine.requests)
    start_all(relay)
    play_until_over(relay)
    assert len(errors(relay)) == 1 and waits and all(waits)
    relay.finish()


@pytest.mark.parametrize(("worker", "name"), STEPS[:-1])
def test_a_process_without_memory_ends_its_engine(worker: str, name: str) -> None:
    with pytest.raises(MemoryError):
        play_with(worker, name, MemoryError)


@pytest.mark.parametrize(("worker", "name"), STEPS[:-1])
def test_a_device_on_which_nothing_succeeds_ends_the_engine(worker: str, name: str) -> None:
    with pytest.raises(Fault):
        play_with(worker, name, Fault, probe_fails=True)


@pytest.mark.parametrize(("worker", "name"), STEPS)
def test_requests_that_all_fail_on_a_device_that_works_do_not_end_the_engine(worker: str, name: str) -> None:
    relay = play_with(worker, name, Fault)
    assert errors(relay)
    relay.finish()


@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_blocks_that_cannot_be_freed_end_the_engine(worker: str) -> None:
    rig = Rig(decode_blocks=40)
    relay = Relay(rig, expects_faults=True)
    start_all(relay)
    relay.play(2)
    poison(rig.pools[worker], "free", lambda blocks: len(blocks) > 0)
    with pytest.raises(BookkeepingError):
        relay.play(60)


def test_a_choice_that_speculation_cannot_forget_ends_the_engine() -> None:
    rig = Rig()
    relay = Relay(rig, expects_faults=True)
    poison(rig.runners["decode"], "forget", lambda choice: True)
    relay.start(make_request("r", 5))
    with pytest.raises(BookkeepingError, match="end_choice"):
        relay.play(60)


def test_an_item_that_no_thread_takes_ends_the_encoder() -> None:
    rig = Rig()
    poison(rig.executor, "submit", lambda *_: True)
    rig.receive("encoder", StartEncode("r", 0, make_item("a", 3), 10.0))
    with pytest.raises(BookkeepingError):
        rig.turn()
