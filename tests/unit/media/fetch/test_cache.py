"""What is kept of what URLs gave."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.media.fetch.cache import FOREVER, MAX_ANSWERS, ContentCache, Downloaded, Freshness, freshness
from tests.fakes.clock import ManualClock

TAG = (("If-None-Match", '"1"'),)


@pytest.mark.parametrize(
    "control, age, expected",
    [
        ("", None, Freshness(True, 0)),
        ("max-age=60", None, Freshness(True, 60)),
        ('Public , MAX-AGE="60"', None, Freshness(True, 60)),
        ("max-age=60", "20", Freshness(True, 40)),
        ("max-age=60", "90", Freshness(True, 0)),
        ("max-age=60", "soon", Freshness(True, 0)),
        ("max-age=999999", None, Freshness(True, 3600)),
        ("max-age=60, max-age=5", None, Freshness(True, 60)),
        ("max-age=-1", None, Freshness(True, 0)),
        ("max-age", None, Freshness(True, 0)),
        ("max-age=" + "9" * 5000, None, Freshness(True, 0)),
        ("max-age=٦٠", None, Freshness(True, 0)),
        ("s-maxage=60", None, Freshness(True, 0)),
        ("no-cache, max-age=60", None, Freshness(True, 0)),
        ('no-cache="x", max-age=60', None, Freshness(True, 0)),
        ("no-store, max-age=60", None, Freshness(False, 60)),
    ],
)
def test_a_host_says_how_long_its_answer_holds(control, age, expected):
    assert freshness(control, age) == expected


def test_a_chain_is_as_fresh_as_its_stalest_answer():
    assert FOREVER.and_(Freshness(True, 5)).and_(Freshness(False, 9)) == Freshness(False, 5)


def put(
    cache: ContentCache, url: str, data: bytes, allowed: Freshness = FOREVER, validators=(), tenant: str = ""
):
    return cache.put((tenant, url), Downloaded(data, hashlib.sha256(data).digest(), allowed, url, validators))


def content(cache: ContentCache, url: str, tenant: str = "") -> bytes | None:
    known = cache.get((tenant, url))
    return None if known is None else known[1]


def test_a_tenant_sees_only_its_own_answers():
    cache = ContentCache(100, ManualClock())
    put(cache, "a", b"x", tenant="one")
    assert content(cache, "a", "one") == b"x"
    assert content(cache, "a", "two") is None


def test_an_answer_turns_stale_and_is_still_known():
    clock = ManualClock()
    cache = ContentCache(100, clock)
    put(cache, "a", b"x", Freshness(True, 5))
    found = cache.get(("", "a"))
    assert found is not None
    answer, _ = found
    assert cache.is_fresh(answer)
    clock.at = 5
    assert not cache.is_fresh(answer)
    assert content(cache, "a") == b"x"


@pytest.mark.parametrize(
    "allowed, validators",
    [(Freshness(False, 60), TAG), (Freshness(True, 0), ())],
    ids=["no-store", "useless"],
)
def test_what_may_not_be_kept_or_never_used_again_replaces_what_was(allowed, validators):
    cache = ContentCache(100, ManualClock())
    put(cache, "a", b"old")
    put(cache, "a", b"new", allowed, validators)
    assert content(cache, "a") is None


def test_a_stale_answer_with_a_validator_is_kept():
    cache = ContentCache(100, ManualClock())
    put(cache, "a", b"x", Freshness(True, 0), TAG)
    found = cache.get(("", "a"))
    assert found is not None
    answer, data = found
    assert (answer.validators, data) == (TAG, b"x")


def test_the_least_recently_used_content_goes_first_and_its_answers_with_it():
    cache = ContentCache(10, ManualClock())
    for url, data in (("a", b"aaaa"), ("b", b"bbbb")):
        put(cache, url, data)
    content(cache, "a")
    put(cache, "c", b"cccc")
    assert (content(cache, "a"), content(cache, "b"), content(cache, "c")) == (b"aaaa", None, b"cccc")


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing():
    cache = ContentCache(10, ManualClock())
    put(cache, "a", b"aaaa")
    put(cache, "b", b"b" * 11)
    assert (content(cache, "a"), content(cache, "b")) == (b"aaaa", None)


def test_the_number_of_answers_is_bounded():
    cache = ContentCache(10, ManualClock())
    for idx in range(MAX_ANSWERS + 1):
        put(cache, str(idx), b"x")
    assert content(cache, "0") is None
    assert content(cache, "1") == b"x"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.binary(max_size=8), st.booleans()), max_size=40))
def test_the_bytes_are_counted_and_bounded(steps):
    cache = ContentCache(20, ManualClock())
    for url, data, may_store in steps:
        assert put(cache, url, data, Freshness(may_store, 60)) == data
        assert len(data) * may_store <= cache.num_bytes <= 20
        known = content(cache, url)
        assert known == (data if may_store else None)
