"""A door's check: hostile structures end in their own process, within a second, with an error that names the field;
the others are not held up for long."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cluster.errors import UnavailableError
from cluster.structure.checker import StructureChecker
from cluster.structure.matcher import StructureError
from cluster.types.structure import Structure
from tests.fakes.structures import demo_source, of_choices, of_grammar, of_regex, of_schema

HOSTILE = {
    "an exponential regex": of_regex("(?s).*a.{0,3000}(b.{0,3000}c.{0,3000}){0,50}d"),
    "a deep grammar": of_grammar("start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "many properties": of_schema({
        "type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f".*{i}.*x{{1,900}}"} for i in range(900)}
    }),
}  # fmt: skip


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
    for structure in HOSTILE.values():
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
