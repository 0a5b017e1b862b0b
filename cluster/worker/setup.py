"""What a worker process knows before it builds anything: its name, its device, where it listens."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.config.environment import read_environment
from cluster.config.machine import select_gpu_kernels
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.native.variants import select
from cluster.rpc import new_address
from cluster.worker.late_memory import LateMemory
from kv_transfer.agents.factory import Transport
from kv_transfer.agents.transport_probe import probe_transport

logger = logging.getLogger(__name__)

# Bytes per second; transfers through the host's memory are slower, over CUDA IPC ten times as fast.
SLOW_LANE = 20e9
# How long a thread that computes in Python keeps the interpreter's lock from the transfer thread; Python's
# default is 5 ms. A hand-over next to such a thread took 7.5 ms with the default and 3.4 ms with this one,
# and that thread was no slower (`python -m bench.transfer cost`); half of it gained nothing more.
SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    replica_id: str
    device: torch.device
    dtype: torch.dtype
    host: str  # address at which other workers reach this replica
    transport: Transport
    net_devices: tuple[str, ...]  # network devices that NIXL may listen on
    address: str  # of the side channel; a TCP port of 0 is replaced when the server starts
    secret: str | None
    folder: Path  # of this user on this host: sockets, and the meeting points of processes
    # shared with the workers of this host that run on its cores; None: on a GPU
    cpu_slots_folder: Path | None
    late_memory: LateMemory
    hang_timeout_s: float  # see `cluster.pulse`


def set_up(
    args: ClusterArgs, replica_id: str, *, host: str = "127.0.0.1", transport: Transport | None = None
) -> WorkerSetup:
    """Selects this process's CPU variant and GPU kernels, lets its threads change places sooner, and on a GPU
    with float32 switches TF32 off: torch allows its 10 bits of mantissa in convolutions unless told
    otherwise. `host`: where other hosts reach this process. `transport`: `in_process` is for workers that
    share a process; None: as configured. Raises ConfigError if the configuration asks for a device or a
    variant that is not available."""
    environment = read_environment()
    select(args.cpu_kernels)
    select_gpu_kernels(args.gpu_kernels)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise ConfigError("the configuration asks for CUDA, but this replica sees no GPU")
    device = torch.device("cuda" if args.device != "cpu" and has_cuda else "cpu")
    dtypes = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}
    dtype = dtypes.get(args.dtype) or getattr(torch, args.dtype)
    if device.type == "cuda" and dtype is torch.float32:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    address = new_address(args.side_channel, name=replica_id, directory=environment.socket_dir, host=host)
    cpu_slots_folder = environment.socket_dir if device.type == "cpu" else None
    return WorkerSetup(
        replica_id=replica_id,
        device=device,
        dtype=dtype,
        host=host,
        transport=transport or args.transport,
        net_devices=args.net_devices,
        address=address,
        secret=environment.cluster_secret,
        folder=environment.socket_dir,
        cpu_slots_folder=cpu_slots_folder,
        late_memory=LateMemory(cpu_slots_folder),
        hang_timeout_s=args.hang_timeout_s,
    )


def check_device_transport(setup: WorkerSetup) -> None:
    """On a GPU, before its memory is filled: checks whether NIXL reaches the memory from other processes.
    Raises ConfigError if it does not."""
    if setup.device.type != "cuda" or setup.transport != "nixl":
        return
    speed = probe_transport(setup.device)
    if speed < SLOW_LANE:
        logger.warning(
            "%s: NIXL moves this GPU's memory between processes at %.1f GB/s only, so not by CUDA IPC "
            "(containers need a common IPC namespace and all GPUs visible)",
            setup.replica_id,
            speed / 1e9,
        )
    else:
        logger.info("%s: NIXL moves this GPU's memory at %.1f GB/s", setup.replica_id, speed / 1e9)
