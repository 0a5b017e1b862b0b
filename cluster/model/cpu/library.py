"""The kernels of this package in this process: which variant, and the C interface of all of them.

Loaded once for each selected variant, on first use, from any thread. A call releases the interpreter's lock
while it runs.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cluster.model.cpu.weight_source import Arena, FreshWeights, WeightSource
from cluster.native import library as native
from cluster.native.variants import Variant, selected_variants

SOURCES = Path(__file__).parent


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Successive fields of a struct that have one type. Interned, as ctypes sets them by their names."""
    return [(sys.intern(name), kind) for name in names.split()]


class Layer(ctypes.Structure):
    """Mirrors `Layer` of kernels.h. Holds pointers only: its owner keeps the tensors alive."""

    _fields_ = (
        *fields(c_void_p, "packed bias scales sums"),
        *fields(c_int64, "inputs outputs gated"),
        ("adapters", c_void_p),
        *fields(c_int64, "parts down_width second third"),
    )


class LayerAdapter(ctypes.Structure):
    """Mirrors `LayerAdapter` of kernels.h."""

    _fields_ = (*fields(c_void_p, "down up"), ("rank", c_int64))


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
    # structs, by their addresses
    "run_decoder": (c_void_p, c_void_p),
    "encoder_layer": (c_void_p, c_void_p, c_void_p, c_void_p),  # and x, y
    "run_mixer": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),  # and rows, out, threads
    # logits, stride, vocabulary, rows, keys, temperatures, tokens, count, threads
    "draw_tokens": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int),
}


@dataclass(frozen=True)
class Kernels:
    """The functions named above are declared."""

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
