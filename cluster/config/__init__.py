"""What the operator decides, and what is known before a model is loaded.

* `settings`: the arguments of a cluster, a frozen value; `resolution`: with what depends on the machine.
* `environment`: the only reader of environment variables.
* `checkpoint`, `hub`: what a model folder says about itself, and how it gets onto this machine.
* `quantised`: whether its weights are plain numbers, or become such.
* `families`: what differs between multimodal model types.
* `machine`: what the kernel says about this machine.
"""

from cluster.config.environment import Environment, read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs, DecodeArgs, DoorArgs, EncodeArgs, PrefillArgs

__all__ = [
    "ClusterArgs", "DecodeArgs", "DoorArgs", "EncodeArgs", "Environment", "PrefillArgs", "read_environment",
    "resolve",
]  # fmt: skip
