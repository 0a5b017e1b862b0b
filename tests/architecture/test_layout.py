"""How text stands on the page: no line above 110 columns, and a comment that does not fit stands above its line.

tests/architecture/not_done.py counts what is left. When no long line is left, E501 of ruff takes over.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.not_done import COMMENTS_BEHIND_BRACKETS, LONG_LINES
from tests.architecture.sources import (
    SOURCES,
    TESTS,
    check_limits,
    name_of,
    room_of,
    text_of,
)

MAX_COLUMNS = 110
BRACKET_AND_COMMENT = re.compile(r"\s*[)\]}]\s+(#.*)")
DIRECTIVES = ("# fmt:", "# type:", "# pyright:", "# noqa")  # they must stand where they are
FILES = [*SOURCES, *TESTS]


def test_no_line_is_longer_than_110_columns():
    found = defaultdict(list)
    for path in FILES:
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                found[room_of(path)].append(f"{name_of(path)}:{number} {len(line)}")
    check_limits(found, LONG_LINES)


def test_a_comment_that_does_not_fit_stands_above_its_line():
    found = defaultdict(list)
    for path in FILES:
        for number in _comments_behind_brackets(path):
            found[room_of(path)].append(f"{name_of(path)}:{number}")
    check_limits(found, COMMENTS_BEHIND_BRACKETS)


def _comments_behind_brackets(path: Path) -> Iterator[int]:
    """Lines that the formatter broke because of their comment: it follows a bracket that stands alone."""
    for number, line in enumerate(text_of(path).splitlines(), 1):
        match = BRACKET_AND_COMMENT.match(line)
        if match and not match[1].startswith(DIRECTIVES):
            yield number
