"""Tests look at the product from outside, and have short names.

tests/architecture/not_done.py counts what still reaches into private names; a number may only fall. A test
that needs such a name is better served by what comes out, or by a constructor argument.
"""

from __future__ import annotations

from tests.architecture.findings import LIMITS
from tests.architecture.sources import TESTS, check_limits, functions_of, name_of

MAX_NAME = 113  # characters; a short sentence has about 60


def test_tests_do_not_reach_into_private_names():
    _, find, limits = LIMITS["PRIVATES"]
    check_limits(find(), limits)


def test_no_name_of_a_test_is_longer_than_the_longest_was():
    names = {function.name: name_of(path) for path in TESTS for function in functions_of(path)}
    assert not [f"{path} {name}" for name, path in names.items() if len(name) > MAX_NAME]
