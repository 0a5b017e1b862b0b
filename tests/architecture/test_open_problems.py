"""docs/open-problems.md: every answer is a command, and what it names exists."""

from __future__ import annotations

import re

from tests.architecture.sources import REPOSITORY, functions_of, text_of

PAGE = REPOSITORY / "docs" / "open-problems.md"
SECTIONS = re.split(r"^## ", text_of(PAGE), flags=re.MULTILINE)[1:]
SOURCE = re.compile(r"\b(?:sglang|vllm|dynamo|ray|kserve|llm-d-router|llm-d-autoscaling)#\d+")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
MIN_ANSWERED = 12


def test_every_problem_has_its_source_a_command_and_an_outcome():
    numbered = [section for section in SECTIONS if re.match(r"\d+\. ", section)]
    assert [int(section.split(".")[0]) for section in numbered] == list(range(1, 16))
    for section in numbered:
        for part in ("* **Reported**:", "* **Here**:", "* **Outcome**:"):
            assert part in section, section
        assert SOURCE.search(section) and re.search(
            r"`python -m (pytest -q tests/|bench\.|cluster\.)", section
        )


def test_the_table_counts_what_is_answered():
    rows = re.findall(r"^\| (\d+) \| .* \| (yes|in part|no) \|$", text_of(PAGE), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    assert sum(answer == "yes" for _, answer in rows) >= MIN_ANSWERED


def test_tests_and_claims_that_are_named_exist():
    text = text_of(PAGE)
    claims = "".join(text_of(path) for path in (REPOSITORY / "bench" / "claims").glob("*.py"))
    missing = [name for name in re.findall(r"bench\.claims (\w+)", text) if f'"{name}": Claim(' not in claims]
    for file, name in TEST.findall(text):
        path = REPOSITORY / file
        if not path.is_file() or all(function.name != name for function in functions_of(path)):
            missing.append(f"{file}::{name}")
    assert not missing and len(TEST.findall(text)) >= MIN_ANSWERED
