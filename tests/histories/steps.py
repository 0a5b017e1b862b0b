"""A scripted mix of requests in which one process is killed before its N-th protocol step, for every N.

A step is a message that is delivered, a write or a notification that lands, or a turn of an engine. The
victims are one worker of each phase and a door, and one of two workers of several phases, between which
requests are scattered. The run ends when no step is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from cluster.types.members import Role
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from tests.histories.clients import ITEMS, make_prompt
from tests.histories.history import END_S, FORGET_S, LEDGER_S, alone
from tests.histories.lookout import Lookout
from tests.histories.oracle import check_answers, check_budgets, check_ledgers
from tests.histories.world import Shape, World

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE
VICTIMS: dict[str, tuple[Role, ...]] = {  # and the cluster that loses it
    "E0": (E, P, D),
    "P1": (E, P, D),
    "D2": (E, P, D),
    "door0": (E, P, D),
    "L1": (E, Role.LANGUAGE, Role.LANGUAGE),
    "EP0": (Role.ENCODE_PREFILL, Role.ENCODE_PREFILL, D),
    "W1": (Role.WHOLE, Role.WHOLE),
}
REPLACED_AFTER_S = 0.2


def requests() -> Iterator[tuple[GenerateRequest, list]]:
    """Text, media that are shared, choices, guidance, and more blocks than there are."""
    one, two = (SamplingParams(seed=3),), (SamplingParams(seed=1), SamplingParams(seed=2))
    stop = StopParams(4)
    yield GenerateRequest("text", make_prompt(range(100, 109)), one, stop), []
    items = [ITEMS[0], ITEMS[1]]
    yield GenerateRequest("media", make_prompt(range(100, 106), items), one, stop), items
    items = [ITEMS[0]]
    yield GenerateRequest("shared", make_prompt(range(200, 204), items), two, stop), items
    guidance = Guidance(2.0, Prompt((300, 301, 302)))
    yield GenerateRequest("guided", make_prompt(range(100, 104)), one, StopParams(3), guidance), []


def crash_at(victim: str, nth: int) -> bool:
    """False: there were not so many steps."""
    rng = Random(nth)
    with alone() as errors:
        roles = VICTIMS[victim]
        world = World(rng, Shape(roles, scattered=0.0 if len(set(roles)) == len(roles) else 1.0))
        scheduler, lookout = world.scheduler, Lookout(world)
        struck: list[int] = []

        def before_step(number: int) -> None:
            if number == first_step + nth:
                struck.append(number)
                _kill(world, victim)

        with world.lease_ids():
            scheduler.run_until(0.1)
            first_step = scheduler.num_steps
            scheduler.before_step = before_step
            for request, items in requests():
                world.clients.submit(world.doors[0], request, items)
            scheduler.run_until(END_S)
            check_budgets(world)
            assert all(story.is_over for story in world.clients.stories.values()), "a request waits for ever"
            check_answers(world, ())
            scheduler.run_until(END_S + LEDGER_S)
            lookout.is_over = True
            scheduler.run_until(END_S + LEDGER_S + FORGET_S)
            world.wake_all()
            scheduler.run_until(scheduler.now + 1.0)
            check_ledgers(world)
            assert not errors, errors[0].getMessage()
    return bool(struck)


def _kill(world: World, victim: str) -> None:
    if victim == "door0":
        world.kill(world.doors[0].process)
        world.scheduler.after(REPLACED_AFTER_S, None, "", world.start_door, "door0")
    else:
        worker = world.workers[victim]
        world.kill(worker.process)
        world.replace_later(worker, REPLACED_AFTER_S, is_same_name=False)


def crash_everywhere(victim: str, first: int = 1, stride: int = 1) -> int:
    """How many steps were tried. Raises AssertionError with the first step that fails."""
    nth = first
    while True:
        try:
            if not crash_at(victim, nth):
                return (nth - first) // stride
        except AssertionError as error:
            raise AssertionError(f"{victim} killed before step {nth}: {error}") from error
        nth += stride
