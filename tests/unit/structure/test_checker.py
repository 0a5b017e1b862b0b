"""A door's check: hostile structures end in their own process, within a second, with an error that names
the field; the others are not held up for long."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.errors import UnavailableError
from cluster.structure.checker import StructureChecker
from cluster.structure.matcher import StructureError
from cluster.types.structure import Structure
from tests.fakes.structures import demo_source, of_choices, of_grammar, of_regex, of_schema

MANY_DIGITS = of_schema({"type": "integer", "multipleOf": 1_000_003})  # takes too long
DEEP_RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(4000))
STACK = of_grammar(f'start: r0\n{DEEP_RULES}\nr4000: "a"')  # ends the process
STUCK = of_regex("(a?){5000}a{5000}")  # compiles, but no answer gets far
AMBIGUOUS = of_grammar("start: e\ne: e e | A\nA: /[a-z ]/")  # every token takes longer
HOSTILE = (MANY_DIGITS, STACK, STUCK, AMBIGUOUS)


@pytest.fixture
async def checker() -> AsyncIterator[StructureChecker]:
    checker = StructureChecker(demo_source)
    yield checker
    checker.close()


async def refusal(checker: StructureChecker, structure: Structure) -> str:
    with pytest.raises(StructureError) as raised:
        await checker.check(structure, "")
    assert raised.value.status == 400 and raised.value.param == structure.param
    return raised.value.message


async def test_hostile_structures_are_refused_and_good_ones_pass(checker: StructureChecker):
    process = None
    for structure in HOSTILE:
        assert await refusal(checker, structure)
        await checker.check(of_choices("yes", "no"), "")
        process = process or checker._process._process
    assert checker._process._process is process, "the process itself lives on"


async def test_an_answer_is_kept(checker: StructureChecker):
    message = await refusal(checker, of_regex("(unclosed"))
    checker._process.ask = None  # type: ignore[method-assign]
    assert await refusal(checker, of_regex("(unclosed")) == message


async def test_a_process_that_was_killed_is_started_again(checker: StructureChecker):
    await checker.check(of_regex("a"), "")
    process = checker._process._process
    assert process is not None
    process.kill()
    await checker.check(of_regex("b"), "")
    assert checker._process._process is not process


async def test_a_checker_that_is_closed_says_so():
    checker = StructureChecker(demo_source)
    checker._process.close()
    with pytest.raises(UnavailableError):
        await checker.check(of_regex("a"), "")
    checker.close()
