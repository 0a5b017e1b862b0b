"""Compiles a folder of C++ sources into one shared library per CPU variant, and keeps the library.

The name of a library holds a hash of everything that went into it: a changed source, flag or torch gives
another file, and nothing is ever rebuilt in place. The libraries lie in `_build` next to this file or, if
that is not writable, in the user's cache folder. A library is code, so it is used only if root, this user and
the owner of this file alone can have written it. If several processes start together, one builds and the
others wait. The library uses the OpenMP runtime that torch ships: a second one in the process would be a
second pool of threads on the same cores.

`python -m cluster.native.build FOLDER ...` builds these folders ahead, for the variants that this machine's
CPU runs; with `--all` for every variant, as an image needs them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cluster.native.variants import VARIANTS, Variant, runnable_variants

logger = logging.getLogger(__name__)

CACHES = (Path(__file__).parent / "_build", Path("~/.cache/epdg/kernels").expanduser())
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wall")
OWNERS = frozenset({0, os.geteuid(), os.stat(__file__).st_uid})  # the last could change this code, too
MODE = 0o755  # of folders and libraries, whatever the umask is
EVERY = "--all"
LIMIT_S = 300.0  # one compilation takes 3 s on an idle core


def build(
    sources: Path,
    variant: Variant,
    caches: Sequence[Path] = CACHES,
    compilers: Sequence[str] = COMPILERS,
    owners: Collection[int] = OWNERS,
) -> Path | None:
    """The library of the folder `sources`, or None with the reason in the log. Builds it if no cache has it:
    blocks for seconds."""
    name = f"{sources.name}-{variant.name}-{_digest(sources, variant)}.so"
    for cache in caches:
        if _is_trusted(cache, owners) and _is_trusted(cache / name, owners):
            return cache / name
    cache = next((each for each in caches if _is_prepared(each, owners)), None)
    if cache is None:
        logger.warning(
            "no native CPU kernels: none of %s is writable for this user alone", ", ".join(map(str, caches))
        )
        return None
    with (cache / f".lock-{sources.name}-{variant.name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_trusted(cache / name, owners):
            return cache / name
        return _build_with_any(compilers, sources, variant, cache / name)


def _build_with_any(compilers: Sequence[str], sources: Path, variant: Variant, target: Path) -> Path | None:
    reasons = []
    for compiler in compilers:
        if shutil.which(compiler) is None:
            reasons.append(f"{compiler}: not found")
            continue
        try:
            _compile(compiler, sources, variant, target)
        except (subprocess.SubprocessError, OSError) as error:
            reasons.append(f"{compiler}: {_said(error)}")
        else:
            return target
    logger.warning(
        "no native CPU kernels (%s, %s), torch's are used: %s", sources.name, variant.name, "; ".join(reasons)
    )
    return None


def _compile(compiler: str, sources: Path, variant: Variant, target: Path) -> None:
    """Objects first, then one library. The linker gets torch's OpenMP runtime by path: with -fopenmp it would
    add its own."""
    files = sorted(sources.resolve().glob("*.cpp"))
    runtime = str(_openmp_runtime() or "-fopenmp")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _run(compiler, *FLAGS, *variant.flags, "-c", *map(str, files), folder=folder)
        objects = [f"{file.stem}.o" for file in files]
        _run(compiler, "-shared", "-Wl,-z,defs", *objects, runtime, "-o", target.name, folder=folder)
        Path(folder, target.name).chmod(MODE)
        os.replace(Path(folder, target.name), target)


def _run(*command: str, folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def _openmp_runtime() -> Path | None:
    """The file that torch loads, or None where torch uses the system's."""
    return next(iter(sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))), None)


def _digest(sources: Path, variant: Variant) -> str:
    files = [*sorted(sources.glob("*.cpp")), *sorted(sources.glob("*.h"))]
    parts = [torch.__version__, *FLAGS, *variant.flags, *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_trusted(path: Path, owners: Collection[int]) -> bool:
    """Whether it is there, and only `owners` can have written it. A folder may be a link, a library not."""
    try:
        status = path.stat(follow_symlinks=path.is_dir())
    except OSError:
        return False
    return status.st_uid in owners and not status.st_mode & 0o022


def _is_prepared(folder: Path, owners: Collection[int]) -> bool:
    """Makes the folder. One of this user that was open to others is closed; what they may have put there is
    not trusted, and links are removed, because files are written here."""
    try:
        folder.mkdir(mode=MODE, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and not _is_trusted(folder, owners):
            folder.chmod(MODE)
            for link in filter(Path.is_symlink, folder.iterdir()):
                link.unlink()
        (folder / ".gitignore").write_text("*\n")
    except OSError:
        return False
    return _is_trusted(folder, owners)


def _said(error: Exception) -> str:
    """The compiler's first complaint."""
    lines = (getattr(error, "stderr", None) or "").splitlines()
    return next((line for line in lines if "error" in line or "undefined" in line), str(error))


def main(args: Sequence[str]) -> None:
    folders = [arg for arg in args if arg != EVERY]
    variants = VARIANTS if EVERY in args else runnable_variants()
    wanted = [(Path(folder), variant) for folder in folders for variant in variants]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each waits for a compiler
        built = threads.map(lambda each: build(*each), wanted)
    for (folder, variant), library in zip(wanted, built, strict=True):
        sys.stdout.write(f"{folder.name} {variant.name}: {library or 'not built'}\n")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main(sys.argv[1:])
