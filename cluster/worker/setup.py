"""What a worker process knows before it builds anything: its name, its device, where it listens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.config.environment import read_environment
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.rpc import new_address


@dataclass(frozen=True)
class WorkerSetup:
    replica_id: str
    device: torch.device
    dtype: torch.dtype
    host: str  # where other hosts reach this replica
    address: str  # of the side channel; a TCP port of 0 is replaced when the server starts
    secret: str | None
    folder: Path  # of this user on this host: sockets, and where processes meet
    turns_folder: Path | None  # shared with the workers of this host that run on its cores; None: on a GPU


def set_up(args: ClusterArgs, replica_id: str) -> WorkerSetup:
    """Raises ConfigError when the configuration asks for a device that is not here."""
    environment = read_environment()
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise ConfigError("the configuration asks for CUDA, but this replica sees no GPU")
    device = torch.device("cuda" if args.device != "cpu" and has_cuda else "cpu")
    dtypes = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}
    dtype = dtypes.get(args.dtype) or getattr(torch, args.dtype)
    address = new_address(
        args.side_channel, name=replica_id, directory=environment.socket_dir, host=args.host
    )
    turns_folder = environment.socket_dir if device.type == "cpu" else None
    return WorkerSetup(
        replica_id,
        device,
        dtype,
        args.host,
        address,
        environment.cluster_secret,
        environment.socket_dir,
        turns_folder,
    )
