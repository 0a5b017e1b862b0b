"""Builds the library that slows the check for signals in Ray's workers down (`slow_timer.cpp`): 100 ms instead
of 10. Ray has no setting for it.

`epdg serve` calls `build` once at each start, before any process of the cluster. Without a compiler Ray keeps
its timer.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("g++", "clang++", "c++")
LIMIT_S = 30.0  # takes 0.1 s on an idle core


def build(folder: Path, compilers: Sequence[str] = COMPILERS) -> Path | None:
    """The library, in `folder`, or None without a compiler. Blocks."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return None
    library = folder / f"{SOURCE.stem}.so"
    command = [
        compiler,
        "-O1",
        "-shared",
        "-fPIC",
        "-fno-threadsafe-statics",
        str(SOURCE),
        "-o",
        str(library),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    except (subprocess.SubprocessError, OSError) as error:
        logger.warning("Ray's workers check for signals every 10 ms: %s", error)
        return None
    return library
