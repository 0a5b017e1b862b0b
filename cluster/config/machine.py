"""What the kernel says about this machine."""

from __future__ import annotations

from pathlib import Path

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the driver's; under WSL


def available_memory() -> int:
    """Bytes that can be allocated now without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def has_gpu() -> bool:
    return any(device.exists() for device in _GPU_DEVICES)
