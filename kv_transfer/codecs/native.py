"""The C interface of codec.cpp and checksum.cpp. Loaded once for each selected variant, on first
use, from any thread."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from cluster.native import library as native
from cluster.native.variants import Variant, selected_variants

SOURCES = Path(__file__).parent


class CodecCall(ctypes.Structure):
    """Mirrors `CodecCall` of codec.cpp."""

    _fields_ = (
        ("planes", c_void_p),
        ("blocks", c_void_p),
        ("wire_blocks", c_void_p),
        ("num_planes", c_int64),
        ("num_groups", c_int64),
        ("block_size", c_int64),
        ("type", c_int64),
        ("bits", c_int64),
    )


def load() -> ctypes.CDLL | None:
    """The best selected variant that can be built here, or None with the reason in the log
    (`cluster.native.variants`). The same object each time."""
    return _load(selected_variants())


@cache
def _load(_of: tuple[Variant, ...]) -> ctypes.CDLL | None:
    return _declared(native.load(SOURCES))


def load_variant(variant: Variant) -> ctypes.CDLL | None:
    return _declared(native.load_variant(SOURCES, variant))


def _declared(library: native.NativeLibrary | None) -> ctypes.CDLL | None:
    if library is None:
        return None
    cdll = library.cdll
    for function in (cdll.codec_encode, cdll.codec_decode):
        function.argtypes, function.restype = (ctypes.POINTER(CodecCall),), None
    cdll.codec_checksum.argtypes, cdll.codec_checksum.restype = (c_void_p, c_int64), c_uint64
    return cdll
