"""The words of docs/glossary.md in the product's names, comments and docstrings, and in the documents.

tests/architecture/not_done.py counts what is left.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.findings import FORBIDDEN, LIMITS, RIDDLE, first_sentence, is_fragment
from tests.architecture.sources import DOCUMENTS, REPOSITORY, check_limits, name_of, text_of


@pytest.mark.parametrize("name", ["NAMES", "OLD_WORDS", "RIDDLES", "CLASSES"])
def test_one_word_per_concept_and_things_as_subjects(name: str):
    _, find, limits = LIMITS[name]
    check_limits(find(), limits)


def test_docstrings_have_a_subject():
    _, find, limits = LIMITS["FRAGMENTS"]
    check_limits(find(), limits)


@pytest.mark.parametrize(
    "docstring",
    [
        "Of one attempt.",
        "That are connected. Any thread.",
        "In which KV can be sent or received here, besides raw.",
        "By the longest beginning of `param` that has another name.",
        "On a thread of the pool; never the engine's.",
        "\n    Until it is cancelled.\n\n    More, about it: here.",
    ],
)
def test_a_fragment_is_found_by_its_opening_words(docstring: str):
    assert is_fragment(first_sentence(docstring))


@pytest.mark.parametrize(
    "docstring",
    [
        "The blocks of one attempt.",
        "Offers the blocks. Of these, some are cached.",
        "After a CUDA error, every later call fails.",
        "Before the first request: measures an encoder call.",
        "At least one half is recognised.",
        "Forgets the peer.",
        "",
    ],
)
def test_a_sentence_is_no_fragment(docstring: str):
    assert not is_fragment(first_sentence(docstring))


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
