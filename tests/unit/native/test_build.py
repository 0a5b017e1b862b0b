"""Building native libraries: failures are None with a reason in the log, a changed source is another
library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.native.build import build
from cluster.native.variants import VARIANTS


@pytest.fixture
def one_small_source(tmp_path) -> Path:
    (tmp_path / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    return tmp_path / "cache"


def test_no_compiler_is_none_with_a_reason(one_small_source, caplog):
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source], ["no-such-compiler"]) is None
    assert "no-such-compiler: not found" in caplog.text


def test_source_that_does_not_compile_is_none_with_the_compilers_words(one_small_source, caplog):
    (one_small_source.parent / "small.cpp").write_text("int answer() { return nothing; }\n")
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source]) is None
    assert "nothing" in caplog.text


def test_no_writable_folder_is_none_with_a_reason(one_small_source, caplog):
    (one_small_source.parent / "file").touch()
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source.parent / "file" / "below"]) is None
    assert "writable" in caplog.text


def test_builds_that_start_together_give_one_library(one_small_source):
    def start(_: int) -> Path | None:
        return build(one_small_source.parent, VARIANTS[-1], [one_small_source])

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(start, range(4)))
    assert len(paths) == 1
    assert {path.suffix for path in one_small_source.iterdir()} == {".so", ""}
    assert list(one_small_source.glob("*.so")) == list(paths)


def test_a_changed_source_is_another_library(one_small_source):
    first = build(one_small_source.parent, VARIANTS[-1], [one_small_source])
    (one_small_source.parent / "small.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source]) != first
