"""A door's check: hostile structures end in their own process, within a second, with an error that names
the field; the others are not held up for long."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.errors import StructureError, UnavailableError
from cluster.structure.check_process import CPU_S, Checked, Order, check
from cluster.structure.checker import CheckProcess, StructureChecker
from cluster.structure.vocabulary import VocabularySource
from cluster.types.structure import Structure
from tests.fakes.structures import demo_source, demo_vocabulary, of_choices, of_grammar, of_regex, of_schema

MANY_DIGITS = of_schema({"type": "integer", "multipleOf": 1_000_003})  # takes too long
DEEP_RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(4000))
STACK = of_grammar(f'start: r0\n{DEEP_RULES}\nr4000: "a"')  # ends the process
STUCK = of_regex("(a?){5000}a{5000}")  # compiles, but no answer gets far
AMBIGUOUS = of_grammar("start: e\ne: e e | A\nA: /[a-z ]/")  # every token takes longer
BAD = Checked("it is not closed")
HOSTILE = (MANY_DIGITS, STACK, STUCK, AMBIGUOUS)


@pytest.fixture
async def checker() -> AsyncIterator[StructureChecker]:
    checker = StructureChecker(demo_source)
    yield checker
    checker.close()


class ScriptedProcess(CheckProcess):
    """Answers by itself."""

    def __init__(self, ask: Callable[[Order], Checked], load: Callable[[], VocabularySource]):
        super().__init__(load)
        self.ask = ask  # type: ignore[method-assign]


def children() -> set[psutil.Process]:
    """The processes that check for this one."""
    processes = psutil.Process().children()
    return {each for each in processes if any("check_process" in part for part in each.cmdline())}


async def refusal(checker: StructureChecker, structure: Structure) -> str:
    with pytest.raises(StructureError) as raised:
        await checker.check(structure, "")
    assert raised.value.status == 400 and raised.value.param == structure.param
    return raised.value.message


async def test_hostile_structures_are_refused_and_good_ones_pass(checker: StructureChecker):
    seen = []
    for structure in HOSTILE:
        assert await refusal(checker, structure)
        await checker.check(of_choices("yes", "no"), "")
        seen.append(children())
    assert seen[0] and all(seen[0] <= each for each in seen), "the process itself lives on"


async def test_an_answer_is_kept():
    asked: list[Order] = []
    checker = StructureChecker(
        demo_source, partial(ScriptedProcess, lambda order: asked.append(order) or BAD)
    )
    assert await refusal(checker, of_regex("(unclosed")) == await refusal(checker, of_regex("(unclosed"))
    assert len(asked) == 1
    checker.close()


async def test_a_process_that_was_killed_is_started_again(checker: StructureChecker):
    await checker.check(of_regex("a"), "")
    (process,) = children()
    process.kill()
    await checker.check(of_regex("b"), "")
    assert children() - {process}


async def test_a_process_that_is_closed_says_so():
    process = CheckProcess(demo_source)
    process.close()
    with pytest.raises(UnavailableError):
        process.ask(Order(of_regex("a"), CPU_S))


async def test_quick_structures_do_not_wait_for_slow_ones_of_their_tenant():
    asked: list[Order] = []
    may_end = threading.Event()

    def ask(order: Order) -> Checked:
        asked.append(order)
        if order.structure.text == "quick":
            return Checked()
        if order.cpu_s == CPU_S:
            may_end.wait(60)
        return Checked("too long", is_out_of_time=True)

    checker = StructureChecker(demo_source, partial(ScriptedProcess, ask))
    slow = [asyncio.create_task(checker.check(of_regex(f"slow {i}"), "")) for i in range(30)]
    await asyncio.sleep(0)
    await checker.check(of_regex("quick"), "")
    assert sum(order.cpu_s == CPU_S for order in asked) == 1 and not any(task.done() for task in slow)
    may_end.set()
    refused = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(each, StructureError) for each in refused)
    assert sum(order.cpu_s == CPU_S for order in asked) == 30
    checker.close()


async def test_the_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EPDG_API_KEYS", "hidden")
    checker = StructureChecker(demo_source)
    await checker.check(of_regex("a"), "")
    (process,) = children()
    assert b"hidden" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    checker.close()


def test_a_fork_opens_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Code that a structure brings into it can do no more than answer."""
    from cluster.structure import check_process

    made = tmp_path / "made"

    def hostile(*_: object) -> None:
        os.write(os.open(made, os.O_CREAT | os.O_WRONLY), b"x")

    monkeypatch.setattr(check_process, "compile_structure", hostile)
    assert check(Order(of_regex("a")), demo_vocabulary()).error
    assert not made.exists()
