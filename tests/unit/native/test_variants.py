"""The choice among compiled variants: what a process loads, and what it refuses."""

from __future__ import annotations

import ctypes

import pytest

from cluster.errors import ConfigError
from cluster.model import sampling
from cluster.model.cpu import library
from cluster.native.variants import (
    AUTO,
    NONE,
    VARIANTS,
    check_choice,
    runnable_variants,
    select,
    variants_for,
)
from kv_transfer.codecs import native as codecs


@pytest.fixture(autouse=True)
def _as_before():
    yield
    select(AUTO)


def address(codec: ctypes.CDLL | None) -> int | None:
    """Where the library is loaded."""
    return None if codec is None else ctypes.cast(codec.codec_encode, ctypes.c_void_p).value


@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda variant: variant.name)
def test_kernels_codecs_and_sampling_use_the_selected_variant(variant):
    best = library.load()
    select(variant.name)
    kernels, codec = library.load(), codecs.load()
    if kernels is None or codec is None:
        pytest.skip("no compiler")
    assert kernels.variant == variant.name and kernels is library.load()
    assert address(codec) == address(codecs.load_variant(variant))
    assert sampling.native_library() is kernels.cdll
    select(AUTO)
    assert library.load() is best


def test_none_loads_no_native_code():
    select(NONE)
    assert library.load() is None and codecs.load() is None and sampling.native_library() is None


def test_a_variant_that_the_processor_cannot_run_is_refused_and_nothing_changes():
    best = library.load()
    with pytest.raises(ConfigError, match="cannot run avx1024; it runs"):
        select("avx1024")
    assert library.load() is best
    with pytest.raises(ConfigError, match="cannot run avx512; it runs avx2"):
        check_choice("avx512", VARIANTS[-1:])
    with pytest.raises(ConfigError, match="it runs no variant"):
        check_choice("avx2", ())
    for name in (AUTO, NONE):
        check_choice(name, ())


def test_the_matrix_unit_is_used_only_where_linux_grants_its_registers():
    all_flags = frozenset().union(*(variant.cpu_flags for variant in VARIANTS))
    names = [
        [variant.name for variant in variants_for(all_flags, lambda granted=granted: granted)]
        for granted in (True, False)
    ]
    assert names == [
        ["amx", "avx512_bf16", "avx512", "avx2"],
        ["avx512_bf16", "avx512", "avx2"],
    ]
