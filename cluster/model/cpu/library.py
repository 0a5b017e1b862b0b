"""The kernels of this package in this process: which variant, and the C interface of `linear.cpp`,
`rows.cpp` and `packing.cpp`.

Loaded once for each selected variant, on first use, from any thread. A call releases the interpreter's lock
while it runs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cluster.model.cpu.weight_source import Arena, FreshWeights, WeightSource
from cluster.native import library as native
from cluster.native.variants import Variant, selected_variants

SOURCES = Path(__file__).parent


class Layer(ctypes.Structure):
    """Mirrors `Layer` of kernels.h. Holds pointers only: its owner keeps the tensors alive."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("gated", c_int64),
        ("adapters", c_void_p),
        ("parts", c_int64),
        ("down_width", c_int64),
        ("second", c_int64),
        ("third", c_int64),
    )


class LayerAdapter(ctypes.Structure):
    """Mirrors `LayerAdapter` of kernels.h."""

    _fields_ = (("down", c_void_p), ("up", c_void_p), ("rank", c_int64))


_LINEAR = (c_void_p, c_void_p, c_void_p, c_int64, c_int)  # layer, x, y, rows, threads
_PACK = (c_void_p, c_void_p, c_void_p, c_int64, c_int64)  # weight, up, packed, outputs, inputs
_PACK_INT8 = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)  # and scales, sums
# weight, x, y, rows, width, epsilon, is_shifted, threads
_NORM = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int, c_int)
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
    """The functions named above are declared. A caller of another function declares its arguments."""

    cdll: ctypes.CDLL
    variant: str  # the compiled one's name
    capabilities: frozenset[str]  # CPU features that it uses, as /proc/cpuinfo spells them
    panel_outputs: int  # packed weights are padded to a multiple of it
    weights: WeightSource = field(default_factory=FreshWeights)  # where packed weights lie
    # where adapters lie: those of one adapter are made one after the other, so pieces are given back together
    adapters: Arena = field(default_factory=lambda: Arena(8 << 20))


def load() -> Kernels | None:
    """The best selected variant that can be built here, or None with the reason in the log
    (`cluster.native.variants`). The same object each time."""
    return _load(selected_variants())


@cache
def _load(_of: tuple[Variant, ...]) -> Kernels | None:
    return _declared(native.load(SOURCES))


def load_variant(variant: Variant) -> Kernels | None:
    return _declared(native.load_variant(SOURCES, variant))


def _declared(library: native.NativeLibrary | None) -> Kernels | None:
    if library is None:
        return None
    cdll = library.cdll
    for name, arguments in _PROTOTYPES.items():
        function = getattr(cdll, name)
        function.argtypes, function.restype = arguments, None
    cdll.panel_outputs.restype = c_int64
    return Kernels(cdll, library.variant, library.capabilities, cdll.panel_outputs())
