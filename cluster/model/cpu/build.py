"""Compiles the C++ sources of this package into one shared library per CPU variant, and keeps it.

A library's name holds a hash of all that went into it, so a changed source, flag or torch is another file and nothing is ever
rebuilt in place. It lies in `_build` next to the sources or, where that is not writable, in the user's cache folder.
Processes that start together wait for one of them to build. The library uses the OpenMP runtime that torch ships: a second one
in the process would be a second pool of threads on the same cores.

`python -m cluster.model.cpu.build` builds ahead for every variant.
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
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
FOLDERS = (PACKAGE / "_build", Path("~/.cache/epdg/kernels").expanduser())
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wall")
LIMIT_S = 300.0  # one compilation takes 3 s on an idle core

_X86_64_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """One way to compile the sources. cpu_flags: what a CPU must have to run it, as /proc/cpuinfo spells it."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]


VARIANTS = (  # best first
    Variant(
        "avx512_bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _X86_64_V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    Variant("avx512", ("-march=x86-64-v4",), _X86_64_V4),
    Variant("avx2", ("-march=x86-64-v3",), _X86_64_V3),
)


def build(
    variant: Variant, folders: Sequence[Path] = FOLDERS, compilers: Sequence[str] = COMPILERS
) -> Path | None:
    """The library, built if it is not there yet (blocks for seconds), or None with the reason in the log."""
    sources = sorted(PACKAGE.glob("*.cpp"))
    name = f"native-{variant.name}-{_digest(sources, variant)}.so"
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    folder = next(filter(_is_writable, folders), None)
    if folder is None:
        logger.warning("no native CPU kernels: none of %s is writable", ", ".join(map(str, folders)))
        return None
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / name).exists():
            return folder / name
        return _build_with_any(compilers, sources, variant, folder / name)


def _build_with_any(
    compilers: Sequence[str], sources: Sequence[Path], variant: Variant, target: Path
) -> Path | None:
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
    logger.warning("no native CPU kernels (%s), torch's are used: %s", variant.name, "; ".join(reasons))
    return None


def _compile(compiler: str, sources: Sequence[Path], variant: Variant, target: Path) -> None:
    """Objects first, then one library against torch's OpenMP runtime by path: with -fopenmp the linker would add its own."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _run(compiler, *FLAGS, *variant.flags, "-c", *map(str, sources), folder=folder)
        objects = [f"{source.stem}.o" for source in sources]
        runtime = _openmp_runtime()
        _run(
            compiler,
            "-shared",
            "-Wl,-z,defs",
            *objects,
            str(runtime or "-fopenmp"),
            "-o",
            target.name,
            folder=folder,
        )
        os.replace(Path(folder, target.name), target)


def _run(*command: str, folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def _openmp_runtime() -> Path | None:
    """The file that torch loads, or None where torch uses the system's."""
    return next(iter(sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))), None)


def _digest(sources: Sequence[Path], variant: Variant) -> str:
    texts = (source.read_text() for source in (*sources, *sorted(PACKAGE.glob("*.h"))))
    parts = [torch.__version__, *FLAGS, *variant.flags, *texts]
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


def main() -> None:
    for variant in VARIANTS:
        sys.stdout.write(f"{variant.name}: {build(variant) or 'not built'}\n")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
