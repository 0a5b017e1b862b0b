"""NVIDIA's Multi-Process Service (MPS), for workers that share a GPU.

Without it the kernels of two processes never run at the same time: the GPU gives each of them slices of time,
and a kernel of microseconds waits for the other's slice of milliseconds. So a cluster whose configuration
gives workers parts of a GPU starts a daemon of its own, in its folder, which only its user can open. The
daemon ends with the cluster's other processes. No setting of the GPU is changed.

A worker whose daemon does not work cannot use its GPU at all. So a process that does nothing else opens the
GPU through the daemon first; if that fails, the cluster runs without MPS and says so. Untried: clusters ran
on an H100 without a complaint, but whether through the daemon was not looked at.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DAEMON = "nvidia-cuda-mps-control"
PROBE_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
# Exit status 0: the first GPU has been opened. By CUDA's driver API, because torch takes seconds to import.
PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
steps = (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
    lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
)
raise SystemExit(next((error for error in (step() for step in steps) if error), 0))
"""


def shares_gpus(content: Mapping[str, Any]) -> bool:
    """Whether a Serve configuration gives a deployment's replicas a part of a GPU."""
    options = (
        deployment.get("ray_actor_options") or {}
        for application in content["applications"]
        for deployment in application.get("deployments") or ()
    )
    return any(0 < each.get("num_gpus", 0) < 1 for each in options)


def start_mps(
    folder: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    probe: Sequence[str] = (sys.executable, "-c", PROBE),
) -> tuple[subprocess.Popen[bytes] | None, dict[str, str]]:
    """Starts the daemon in `folder`. Returns it and what its clients need in their environment: None and
    nothing, if it is not installed or the GPU cannot be opened through it. Blocks for about a second."""
    if (program := shutil.which(DAEMON, path=environment.get("PATH"))) is None:
        say(f"{DAEMON} is not installed: workers that share a GPU take turns")
        return None, {}
    pipes = folder / "mps"
    pipes.mkdir(mode=0o700)
    found_by = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    clients = {**environment, **found_by}
    daemon = subprocess.Popen(
        [program, "-f"], env=clients, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        failure = f"error {subprocess.run(probe, env=clients, timeout=PROBE_TIMEOUT_S).returncode}"
    except subprocess.TimeoutExpired:
        failure = f"no answer for {PROBE_TIMEOUT_S:.0f} s"
    if failure == "error 0" and daemon.poll() is None:
        return daemon, found_by
    daemon.terminate()
    try:
        daemon.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    say(f"no GPU can be opened through {DAEMON} ({failure}): workers that share a GPU take turns")
    return None, {}
