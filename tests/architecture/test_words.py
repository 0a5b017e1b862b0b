"""The words of docs/glossary.md in the product's names, comments and docstrings, and in the documents.

tests/architecture/not_done.py counts what is left.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.findings import FORBIDDEN, LIMITS, RIDDLE
from tests.architecture.sources import DOCUMENTS, REPOSITORY, check_limits, name_of, text_of


@pytest.mark.parametrize("name", ["NAMES", "OLD_WORDS", "RIDDLES", "CLASSES"])
def test_one_word_per_concept_and_things_as_subjects(name: str):
    _, find, limits = LIMITS[name]
    check_limits(find(), limits)


def test_the_glossary_lists_what_is_forbidden():
    rows = re.findall(r"^\|.*\|.*\|(.*)\|$", text_of(REPOSITORY / "docs" / "glossary.md"), re.MULTILINE)
    listed = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert listed == FORBIDDEN.keys()


def test_documents_have_things_as_subjects_too():
    found = [
        f"{name_of(path)}:{number} {word}"
        for path in DOCUMENTS
        if not name_of(path).startswith(("bench/", "deploy/")) and name_of(path) != "CHANGELOG.md"
        for number, line in enumerate(text_of(path).splitlines(), 1)
        for word in RIDDLE.findall(re.sub(r"`[^`]*`", "", line))
    ]
    assert not found
