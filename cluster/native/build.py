"""Compiles a folder of C++ sources into one shared library per CPU variant, and keeps the library.

The name of a library holds a hash of everything that went into it: a changed source, flag or torch gives
another file, and nothing is ever rebuilt in place. The libraries lie in `_build` beside this file or, if that
is not writable, in the user's cache folder. If several processes start together, one builds and the others
wait. The library uses the OpenMP runtime that torch ships: a second one in the process would be a second pool
of threads on the same cores.

`python -m cluster.native.build FOLDER ...` builds these folders ahead, for every variant.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cluster.native.variants import VARIANTS, Variant

logger = logging.getLogger(__name__)

CACHES = (Path(__file__).parent / "_build", Path("~/.cache/epdg/kernels").expanduser())
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wall")
LIMIT_S = 300.0  # one compilation takes 3 s on an idle core


def build(
    sources: Path, variant: Variant, caches: Sequence[Path] = CACHES, compilers: Sequence[str] = COMPILERS
) -> Path | None:
    """The library of the folder `sources`, or None with the reason in the log. Builds it if no cache has it:
    blocks for seconds."""
    name = f"{sources.name}-{variant.name}-{_digest(sources, variant)}.so"
    for cache in caches:
        if (cache / name).exists():
            return cache / name
    cache = next(filter(_is_writable, caches), None)
    if cache is None:
        logger.warning("no native CPU kernels: none of %s is writable", ", ".join(map(str, caches)))
        return None
    with open(cache / f".lock-{sources.name}-{variant.name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (cache / name).exists():
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


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
    except OSError:
        return False
    return True


def _said(error: Exception) -> str:
    """The compiler's first complaint."""
    lines = (getattr(error, "stderr", None) or "").splitlines()
    return next((line for line in lines if "error" in line or "undefined" in line), str(error))


def main(folders: Sequence[str]) -> None:
    wanted = [(Path(folder), variant) for folder in folders for variant in VARIANTS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each waits for a compiler
        built = threads.map(lambda each: build(*each), wanted)
    for (folder, variant), library in zip(wanted, built, strict=True):
        sys.stdout.write(f"{folder.name} {variant.name}: {library or 'not built'}\n")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main(sys.argv[1:])
