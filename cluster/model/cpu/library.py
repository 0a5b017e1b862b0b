"""The compiled kernels in this process: which variant, and the C interface of `linear.cpp` and `packing.cpp`.

Loaded once, on first use, from any thread. A call releases the interpreter's lock while it runs.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.model.cpu.build import VARIANTS, Variant, build

logger = logging.getLogger(__name__)


class Layer(ctypes.Structure):
    """Mirrors `Layer` of kernels.h. Pointers; whoever fills it keeps the tensors."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("gated", c_int64),
    )


_LINEAR = (c_void_p, c_void_p, c_void_p, c_int64, c_int)  # layer, x, y, rows, threads
_PACK = (c_void_p, c_void_p, c_void_p, c_int64, c_int64)  # weight, up, packed, outputs, inputs
_PACK_INT8 = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)  # and scales, sums
_NORM = (
    c_void_p,
    c_void_p,
    c_void_p,
    c_int64,
    c_int64,
    c_float,
    c_int,
)  # weight, x, y, rows, width, epsilon, threads
_PROTOTYPES = {
    "linear_f32": _LINEAR,
    "linear_bf16": _LINEAR,
    "linear_i8_f32": _LINEAR,
    "linear_i8_bf16": _LINEAR,
    "pack_f32": _PACK,
    "pack_bf16": _PACK,
    "pack_i8_f32": _PACK_INT8,
    "pack_i8_bf16": _PACK_INT8,
    "rms_norm_f32": _NORM,
    "rms_norm_bf16": _NORM,
}


@dataclass(frozen=True)
class Kernels:
    """variant: the compiled one's name. capabilities: the CPU features it uses, as /proc/cpuinfo spells them.
    panel_outputs: packed weights are padded to a multiple of it. Whoever calls functions of other sources through `cdll`
    declares their arguments."""

    cdll: ctypes.CDLL
    variant: str
    capabilities: frozenset[str]
    panel_outputs: int


@cache
def load() -> Kernels | None:
    """The best variant that this CPU runs and that can be built here, or None with the reason in the log."""
    variants = runnable_variants()
    if not variants:
        logger.warning("no native CPU kernels: this CPU has not got AVX2")
    return next(filter(None, map(load_variant, variants)), None)


def load_variant(variant: Variant) -> Kernels | None:
    path = build(variant)
    if path is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(path)), variant)
    except OSError as error:
        logger.warning("native CPU kernels do not load: %s", error)
        return None


def runnable_variants() -> tuple[Variant, ...]:
    """Best first."""
    flags = _cpu_flags()
    return tuple(variant for variant in VARIANTS if variant.cpu_flags <= flags)


def _declared(cdll: ctypes.CDLL, variant: Variant) -> Kernels:
    for name, arguments in _PROTOTYPES.items():
        function = getattr(cdll, name)
        function.argtypes, function.restype = arguments, None
    cdll.panel_outputs.restype = c_int64
    return Kernels(cdll, variant.name, variant.cpu_flags, cdll.panel_outputs())


def _cpu_flags() -> frozenset[str]:
    """Of the first core; empty where /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
