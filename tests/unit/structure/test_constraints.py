"""Grammars of a worker: compiled once, off the engine's thread, kept within limits; answers that go on
elsewhere are in the same state."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ClusterError, InternalError, StructureError
from cluster.structure import compiler as compiling
from cluster.structure.compiler import GrammarCompiler
from cluster.structure.constraints import Constraints
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.structure import Structure
from tests.fakes.clock import ManualClock
from tests.fakes.structures import END, allowed, demo_source, ids_of, of_choices, of_regex, of_schema
from tests.fakes.workers import Inbox, ManualExecutor

OBJECT = of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


class Bench:
    """Constraints whose threads are moved by hand."""

    def __init__(self) -> None:
        self.clock, self.executor, self.inbox = ManualClock(), ManualExecutor(), Inbox()
        self.num_loaded = 0
        self.constraints = Constraints(GrammarCompiler(self._load, self.clock, self.executor))
        self.constraints.attach(self.inbox.call)
        self.heard: dict[str, ClusterError | None] = {}

    def _load(self) -> Any:
        self.num_loaded += 1
        return demo_source()

    def prepare(self, name: str, structure: Structure, generated: tuple[int, ...] = ()) -> GenerateRequest:
        prompt = Prompt((1, 2, *generated), num_generated=len(generated))
        request = GenerateRequest(
            name, prompt, (SamplingParams(),), StopParams(9, (END,)), structure=structure
        )
        self.constraints.prepare(request, structure, self.heard.__setitem__)
        return request

    def work(self) -> None:
        while self.executor.jobs:
            self.executor.run_one()
            self.inbox.run()

    @property
    def num_jobs(self) -> int:
        return len(self.executor.jobs)


def test_a_grammar_is_compiled_once_and_then_there_at_once():
    bench = Bench()
    first, second = bench.prepare("a", OBJECT), bench.prepare("b", OBJECT)
    assert bench.num_jobs == 1 and not bench.heard
    bench.work()
    assert bench.heard == {"a": None, "b": None}
    bench.prepare("c", OBJECT)
    assert "c" in bench.heard and not bench.num_jobs and bench.num_loaded == 1
    one, other = (bench.constraints.constraint(request, ()) for request in (first, second))
    assert one is not None and other is not None and one.native is not other.native


def test_other_requests_go_on_while_one_is_compiled():
    bench = Bench()
    bench.prepare("known", OBJECT)
    bench.work()
    bench.prepare("slow", of_choices("x"))
    bench.prepare("quick", OBJECT)
    assert set(bench.heard) == {"known", "quick"}


def test_a_refused_structure_is_heard_by_all_and_tried_again():
    bench = Bench()
    for name in ("a", "b"):
        bench.prepare(name, of_regex("(unclosed"))
    bench.work()
    assert all(isinstance(error, StructureError) for error in bench.heard.values()) and len(bench.heard) == 2
    bench.prepare("c", of_regex("(unclosed"))
    assert bench.num_jobs == 1


def test_an_unexpected_error_is_heard(monkeypatch: pytest.MonkeyPatch):
    bench = Bench()
    monkeypatch.setattr(compiling, "compile_structure", lambda *_: 1 / 0)
    bench.prepare("a", OBJECT)
    bench.work()
    assert isinstance(bench.heard["a"], InternalError)


def test_a_request_that_has_ended_hears_nothing():
    bench = Bench()
    request = bench.prepare("a", OBJECT)
    bench.constraints.forget("a")
    bench.work()
    assert not bench.heard and bench.constraints.constraint(request, ()) is None


@pytest.mark.parametrize("limit", ["MAX_GRAMMARS", "MAX_TEXT_CHARS"])
def test_the_least_recently_used_grammar_goes(monkeypatch: pytest.MonkeyPatch, limit: str):
    size = 2 if limit == "MAX_GRAMMARS" else 2 * len(of_choices("a").text)
    monkeypatch.setattr(compiling, limit, size)
    bench = Bench()
    for name in "abac":
        bench.prepare(name, of_choices(name))
        bench.work()
    bench.prepare("a again", of_choices("a"))
    assert not bench.num_jobs
    bench.prepare("b again", of_choices("b"))
    assert bench.num_jobs == 1


def test_grammars_that_were_not_used_for_long_go():
    bench = Bench()
    bench.prepare("a", of_choices("a"))
    bench.work()
    bench.clock.at += compiling.MAX_IDLE_S + 1
    bench.prepare("b", of_choices("b"))
    bench.work()
    bench.prepare("a again", of_choices("a"))
    assert bench.num_jobs == 1


def test_an_answer_that_goes_on_elsewhere_is_in_the_same_state():
    bench = Bench()
    tokens = ids_of('{"a": 12')
    whole = bench.prepare("whole", OBJECT)
    bench.work()
    resumed = [bench.prepare(f"from {i}", OBJECT, tuple(tokens[:i])) for i in range(len(tokens) + 1)]
    bench.work()
    masks = []
    for request in (whole, *resumed):
        matcher = bench.constraints.constraint(request, tokens)
        assert matcher is not None
        masks.append(allowed(matcher))
    assert bench.heard["from 3"] is None and all(mask == masks[0] for mask in masks) and END not in masks[0]


def test_a_request_keeps_its_structure_when_it_goes_on_elsewhere():
    request = Bench().prepare("a", OBJECT)
    assert request.resumed("b", (0,), (5,)).structure == OBJECT and not request.is_plain


def test_masks_of_a_step_are_those_of_each_choice_and_draft():
    bench = Bench()
    request = bench.prepare("a", OBJECT)
    bench.work()
    tokens = ids_of('{"a": 12}')
    matchers = [bench.constraints.constraint(request, tokens[:i]) for i in (0, 2)]
    drafts = tokens[2:]
    wanted = [(matchers[0], ()), (matchers[1], drafts)]
    for _ in range(2):  # a step may be repeated
        bench.constraints.start(wanted)
        masks, late = bench.constraints.take()
        assert not late
    assert len(masks) == 2 + len(drafts)
    for i, mask in enumerate(masks[1:-1]):  # behind the last draft the answer is complete
        behind = bench.constraints.constraint(request, tokens[: 2 + i])
        assert behind is not None
        allowed(behind)
        assert behind.mask is not None and (mask == behind.mask).all()
