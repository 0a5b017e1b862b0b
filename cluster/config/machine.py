"""What is found out about this machine without a library, and whether this process uses what was found of
Triton."""

from __future__ import annotations

import logging
import resource
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the driver's; under WSL


def available_memory() -> int:
    """Bytes that can be allocated now without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def max_open_files() -> int:
    """The number of files that a process of this user may open at once, if it asks for so many."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def has_gpu() -> bool:
    return any(device.exists() for device in _GPU_DEVICES)


class _GpuKernels:
    """The selected ones of this process."""

    name = "auto"


def select_gpu_kernels(name: Literal["auto", "none"]) -> None:
    """auto: Triton's where they can run; none: torch's. For what is loaded from now on. Any thread."""
    _GpuKernels.name = name


def has_triton() -> bool:
    """Whether this process uses Triton's kernels: they can run, and are not switched off."""
    return _GpuKernels.name != "none" and can_run_triton()


@cache
def can_run_triton() -> bool:
    """Triton is installed, with a C compiler, which it calls when it first meets a GPU."""
    if find_spec("triton") is None:
        return False
    if shutil.which("gcc") or shutil.which("clang"):
        return True
    logger.warning("Triton is installed, but neither gcc nor clang, which it needs: plain torch is used")
    return False
