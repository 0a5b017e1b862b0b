"""Thousands of hostile and broken media files through probe, geometry, decode and prepare; see
`bench.fuzz_media`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import fuzz_media
from tests.fakes.slow_params import often

MAX_GROWTH_BYTES = 100 * 2**20


@pytest.mark.parametrize("num_items", often([400, 5_000], [400]))
def test_hostile_media_is_answered_or_refused_and_nothing_else(num_items):
    report = fuzz_media.fuzz(num_items, seed=0)
    assert not report.failures
    assert num_items / 8 < report.num_answers < num_items / 2  # neither all refused nor all unharmed
    assert report.growth_bytes < MAX_GROWTH_BYTES
    assert report.num_leaked_files == 0


def test_any_item_can_be_made_again():
    for idx in (0, 700, 701, 4_999):
        assert fuzz_media.case(3, idx) == fuzz_media.case(3, idx)
    assert fuzz_media.case(3, 4_999) != fuzz_media.case(4, 4_999)


@pytest.mark.parametrize(
    ("end", "item_s", "ending"),
    [("os.abort()", 60.0, "the process ended with -6"), ("time.sleep(600)", 0.5, "hung for 0.5 s")],
)
def test_a_crash_and_a_hang_are_named_by_their_item(end, item_s, ending):
    program = f"import os, time; print('AT 41\\nFAIL 41 (x as image): y\\nAT 42', flush=True); {end}"
    report = fuzz_media.FuzzReport()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, bufsize=0) as child:
        assert fuzz_media.follow(child, 5, report, item_s) == (42, ending)
        child.kill()
    assert report.failures == ["seed 5, item 41 (x as image): y"]
