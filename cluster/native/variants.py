"""The CPU variants that C++ sources are compiled for, and the choice among them in this process.

A process uses the best variant that its CPU runs, unless `select` names another or none. A worker calls
`select` with its setting `cpu_kernels` when it starts, before it loads a model. The choice stays until the
next call. What is loaded already keeps its variant. Imports no torch. Any thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
_X86_64_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# <asm/unistd_64.h>, <asm/prctl.h> and Documentation/arch/x86/xstate.rst of Linux
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Variant:
    """One way to compile. cpu_flags: what a CPU must have to run the result, as /proc/cpuinfo spells it."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]


VARIANTS = (  # best first
    Variant(
        "amx",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _X86_64_V4 | {"avx512_bf16", "avx512_vnni"} | _AMX,
    ),
    Variant(
        "avx512_bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _X86_64_V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    Variant("avx512", ("-march=x86-64-v4",), _X86_64_V4),
    Variant("avx2", ("-march=x86-64-v3",), _X86_64_V3),
)


class _Selection:
    """The selected variant of this process."""

    name = AUTO


@cache
def runnable_variants() -> tuple[Variant, ...]:
    """The variants that this CPU can run, best first; none is a warning."""
    variants = variants_for(_cpu_flags(), _may_use_amx)
    if not variants:
        logger.warning("no native CPU kernels: this CPU has no AVX2")
    return variants


def variants_for(cpu_flags: frozenset[str], may_use_amx: Callable[[], bool]) -> tuple[Variant, ...]:
    """The variants that a CPU with these flags can run, best first. `may_use_amx` is asked only if it has
    AMX."""
    if cpu_flags >= _AMX and not may_use_amx():
        cpu_flags -= _AMX
    return tuple(variant for variant in VARIANTS if variant.cpu_flags <= cpu_flags)


def check_choice(name: str, runnable: tuple[Variant, ...]) -> None:
    """Raises ConfigError unless the CPU, which runs `runnable`, runs the variant `name`; `auto` and `none`
    always pass."""
    names = [variant.name for variant in runnable]
    if name not in (AUTO, NONE, *names):
        runs = ", ".join(names) or "no variant"
        raise ConfigError(
            f"cpu_kernels: this processor cannot run {name}; it runs {runs}", param="cpu_kernels"
        )


def select(name: str) -> None:
    """Every later load in this process takes this variant; `auto`: the best one; `none`: no native code.
    Raises ConfigError if this CPU does not run it."""
    check_choice(name, runnable_variants())
    _Selection.name = name


def selected_variants() -> tuple[Variant, ...]:
    """What a load may take, best first."""
    if _Selection.name == AUTO:
        return runnable_variants()
    return tuple(variant for variant in runnable_variants() if variant.name == _Selection.name)


def _may_use_amx() -> bool:
    """Asks Linux for the tile registers, which a process has not by itself; for all its threads, until it
    ends."""
    libc = ctypes.CDLL(None)
    return libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def _cpu_flags() -> frozenset[str]:
    """The flags of the first core; empty where /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
