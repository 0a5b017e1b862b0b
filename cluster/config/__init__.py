"""What the operator decides: `settings` (a frozen value, made once, without I/O) and `environment` (its one reader)."""

from cluster.config.environment import Environment, read_environment
from cluster.config.settings import ClusterArgs, DecodeArgs, DoorArgs, EncodeArgs, PrefillArgs, resolve

__all__ = [
    "ClusterArgs", "DecodeArgs", "DoorArgs", "EncodeArgs", "Environment", "PrefillArgs", "read_environment", "resolve",
]  # fmt: skip
