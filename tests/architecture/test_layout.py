"""No line is over 110 columns, and a comment that does not fit stands above its line.

tests/architecture/not_done.py counts what is left. When no long line is left, E501 of ruff takes over.
"""

from __future__ import annotations

import pytest

from tests.architecture.findings import LIMITS
from tests.architecture.sources import check_limits


@pytest.mark.parametrize("name", ["LONG_LINES", "COMMENTS"])
def test_text_fits_its_lines(name: str):
    _, find, limits = LIMITS[name]
    check_limits(find(), limits)
