"""Loads the native library of a folder of C++ sources, in the variant that this process has selected (by
default the best that this CPU runs); builds it if it is not there yet.

Any thread. A call of a loaded function releases the interpreter's lock while it runs.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path

from cluster.native.build import build
from cluster.native.variants import Variant, selected_variants

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NativeLibrary:
    cdll: ctypes.CDLL  # its caller declares the functions' arguments
    variant: str  # the compiled one's name
    capabilities: frozenset[str]  # CPU features that it uses, as /proc/cpuinfo spells them


def load(sources: Path) -> NativeLibrary | None:
    """The best selected variant that can be built here, or None with the reason in the log. May build:
    seconds."""
    libraries = (load_variant(sources, variant) for variant in selected_variants())
    return next((library for library in libraries if library is not None), None)


def load_variant(sources: Path, variant: Variant) -> NativeLibrary | None:
    path = build(sources, variant)
    if path is None:
        return None
    try:
        return NativeLibrary(ctypes.CDLL(str(path)), variant.name, variant.cpu_flags)
    except OSError as error:
        logger.warning("native CPU kernels do not load: %s", error)
        return None
