"""Building native libraries: failures are None with a reason in the log, a changed source is another
library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.config.settings import REPOSITORY
from cluster.native.build import build, main
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


def built(folder: Path) -> Path:
    library = build(folder.parent, VARIANTS[-1], [folder])
    assert library is not None
    return library


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_built_is_closed_to_others_whatever_the_umask(one_small_source, open_umask):
    library = built(one_small_source)
    assert [path.stat().st_mode & 0o022 for path in (library, one_small_source)] == [0, 0]


@pytest.mark.parametrize("part", ["library", "folder"])
def test_a_library_that_others_may_have_written_is_built_again(one_small_source, part):
    library = built(one_small_source)
    library.write_bytes(b"of others")
    (library if part == "library" else one_small_source).chmod(0o777)
    if part == "folder":
        library.chmod(0o775)
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source]) == library
    assert b"of others" not in library.read_bytes()
    assert [path.stat().st_mode & 0o022 for path in (library, one_small_source)] == [0, 0]


def test_a_library_of_another_user_is_not_used(one_small_source, caplog):
    library = built(one_small_source)
    others = {library.stat().st_uid + 1}
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source], owners=others) is None
    assert "for this user alone" in caplog.text


def test_no_link_that_others_have_placed_is_followed(one_small_source, tmp_path):
    library = built(one_small_source)
    kept = tmp_path / "kept"
    kept.write_text("kept")
    for place in (library, one_small_source / ".gitignore", next(one_small_source.glob(".lock*"))):
        place.unlink()
        place.symlink_to(kept)
    one_small_source.chmod(0o777)
    assert build(one_small_source.parent, VARIANTS[-1], [one_small_source]) == library
    assert kept.read_text() == "kept" and not library.is_symlink()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["cluster/model/cpu", "cluster/kvcache", "kv_transfer/codecs"])
def test_every_variant_of_our_sources_compiles(folder):
    """Also those that this machine's CPU cannot run, which nothing else builds here."""
    libraries = [build(REPOSITORY / folder, variant) for variant in VARIANTS]
    assert all(libraries)


@pytest.mark.parametrize(("args", "expected"), [([], VARIANTS[2:]), (["--all"], VARIANTS)])
def test_ahead_are_built_the_variants_of_this_cpu_or_all(args, expected, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("cluster.native.build.runnable_variants", lambda: VARIANTS[2:])
    monkeypatch.setattr("cluster.native.build.build", lambda *each: asked.append(each))
    main([*args, str(tmp_path)])
    assert asked == [(tmp_path, variant) for variant in expected]
    assert capsys.readouterr().out.count("not built") == len(expected)
