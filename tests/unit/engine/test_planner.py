"""Which prompts run in the next step, as the planner alone decides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pytest import approx

from cluster.engine.planner import PromptPlanner
from cluster.engine.sequence import TokenSequence
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.request import Prompt
from cluster.worker.cpu_slots import no_cpu_slots
from tests.fakes.clock import ManualClock

FIXED_S, TOKEN_S = 0.010, 2e-5  # of a step: 500 tokens take as long as what every step costs
NUM_TEXT, NUM_ROWS, NUM_TOKENS = 400, 500, 920  # in front of the item, of the item, in all


def make_planner(max_tokens: int) -> PromptPlanner:
    budget = StepBudget(1.0, 16, max_tokens)
    for num_tokens in (16, 128, 1024, 2048) * 4:
        budget.observe(num_tokens, 0.0, FIXED_S + TOKEN_S * num_tokens)
    policy = SchedulingPolicy(aging_s=5.0, tokens_per_s=8000.0, text_share=0.3)
    return PromptPlanner(policy, budget, no_cpu_slots(ManualClock()), num_layers=4)


def add(
    planner: PromptPlanner, name: str, arrived_at: float, is_ready: bool = False, sends: bool = False
) -> None:
    item = PlacedMedia(Modality.IMAGE, name, ((NUM_TEXT, NUM_ROWS),), MediaGeometry(NUM_ROWS))
    sequence = TokenSequence(name, Prompt(tuple(range(NUM_TOKENS)), (item,)))
    sequence.items_arrived([0] if is_ready else [])
    request: Any = SimpleNamespace(sequences=[sequence], sends=sends)
    planner.add(request, sequence, Ticket(name, arrived_at, NUM_TOKENS, is_text=False), ())


def next_step(planner: PromptPlanner, room: int | None = None) -> list[tuple[str, int]]:
    works, _ = planner.next_step(room=room)
    return [(work.sequence.sequence_id, work.num_tokens) for work in works]


def test_a_ready_prompt_does_not_wait_behind_others_whose_text_is_worth_no_step():
    planner = make_planner(max_tokens=2048)
    for i in range(6):  # their text fills a step
        add(planner, f"r{i}", 0.01 * i)
    assert next_step(planner) == []
    add(planner, "ready", 1.0, is_ready=True)
    assert next_step(planner) == [("ready", NUM_TOKENS)]


def test_a_little_text_goes_along_with_a_prompt_that_is_worth_a_step():
    planner = make_planner(max_tokens=2048)
    for i in range(2):
        add(planner, f"r{i}", 0.01 * i)
    add(planner, "ready", 1.0, is_ready=True)
    assert next_step(planner) == [("r0", NUM_TEXT), ("r1", NUM_TEXT), ("ready", NUM_TOKENS)]


def test_a_long_ready_prompt_runs_alone_too_where_its_steps_are_small():
    planner = make_planner(max_tokens=512)
    for i in range(6):
        add(planner, f"r{i}", 0.01 * i)
    add(planner, "ready", 1.0, is_ready=True)
    ((name, num_tokens),) = next_step(planner)
    assert name == "ready" and num_tokens * TOKEN_S == approx(FIXED_S, rel=0.2), "the least that is not waste"


def test_steps_end_at_what_a_recorded_step_holds():
    planner = make_planner(max_tokens=2048)
    add(planner, "a", 0.0, is_ready=True)
    add(planner, "b", 0.1, is_ready=True)
    assert next_step(planner, room=512) == [("a", 512)]
    assert next_step(planner, room=1) == [("a", 16)], "a block at least"
    assert next_step(planner) == [("a", NUM_TOKENS), ("b", NUM_TOKENS)]
