"""The composition root: configuration → Serve application of four deployments, Encode, Prefill, Decode and Door.

`serve run deploy/cluster.yaml` calls `build` with that file's `args`; the file's `deployments:` section overrides what is
set here per deployment (replica counts, resources). Builds nothing itself: model code is imported in the replicas only.
Encode is left out for a model that takes no media. Serve refuses a file that names a deployment which is not here, so a file for all
models names Encode only where it differs from what is set here.

Pools are kept apart by what hosts offer when the application is composed. Where a host of the cluster has a custom resource
`encode_pool`, `prefill_pool` or `decode_pool` (`make serve` gives them to its own host), that pool's replicas take one each and run
only there; where a host has the label `pool=encode`, `pool=prefill` or `pool=decode`, they run only on hosts with it. With
`device: cuda` a replica takes a GPU for each of its ranks. A machine that offers nothing still runs everything.
"""

# No `from __future__ import annotations`: Serve reads `build`'s annotation as a class to validate the arguments with.

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.config import ClusterArgs, read_environment, resolve
from cluster.config.checkpoint import check_checkpoint, takes_media
from cluster.serving.door import DoorReplica
from cluster.serving.exposure import require_authentication
from cluster.serving.hook_router import HookRouter
from cluster.serving.replicas import DecodeReplica, Replica
from cluster.types.members import Role

logger = logging.getLogger(__name__)

SERVICES = {
    Role.ENCODE: "encoder_service.service:EncoderService",
    Role.PREFILL: "prefill_service.service:PrefillService",
    Role.DECODE: "decode_service.service:DecodeService",
}
DOOR = "router.door:Door"
API = "router.openai.app:build_api"

# the engines admit and refuse; Serve's default of 5 would queue behind their backs
MAX_ONGOING_REQUESTS = 1_000_000
HEALTH_CHECK_PERIOD_S = 5.0  # doors notice a death at once, by end-of-file; Serve replaces it this much later
HEALTH_CHECK_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 20.0  # a replica that must go may finish its requests and stop for this long


@dataclass(frozen=True)
class Hosts:
    """What the hosts of the cluster offer now."""

    resources: frozenset[str]
    pool_labels: frozenset[str]  # values of the label `pool`

    @classmethod
    def here(cls) -> "Hosts":
        labels = (node.get("Labels", {}).get("pool") for node in ray.nodes() if node["Alive"])
        return cls(frozenset(ray.cluster_resources()), frozenset(label for label in labels if label))


def build(args: ClusterArgs) -> serve.Application:
    """Raises ConfigError for a model or setting that cannot work, and for a Ray cluster that is open to the network."""
    require_authentication(ray.util.get_node_ip_address(), read_environment())
    return compose(args, Hosts.here())


def compose(
    args: ClusterArgs, hosts: Hosts, services: dict[Role, str] = SERVICES, door: str = DOOR, api: str = API
) -> serve.Application:
    """`build` with other rooms in the same frame: import paths of the classes, so that no process loads what it does not run."""
    resolved = resolve(args, read_environment(), num_cores=len(os.sched_getaffinity(0)))
    config, _ = check_checkpoint(Path(resolved.model))
    roles = [role for role in Role if role is not Role.ENCODE or takes_media(config)]
    if Role.ENCODE not in roles:
        logger.warning("model type '%s' takes no media: there is no encode pool", config["model_type"])
    pools = [_pool(role, resolved, services[role], hosts) for role in roles]
    options = _options("Door")
    return serve.deployment(name="Door", **options)(DoorReplica).bind(resolved, door, api, pools)


def _pool(role: Role, args: ClusterArgs, service: str, hosts: Hosts) -> Any:
    pool = {Role.ENCODE: args.encode, Role.PREFILL: args.prefill, Role.DECODE: args.decode}[role]
    adapter = DecodeReplica if role is Role.DECODE else Replica
    router = RequestRouterConfig(request_router_class=HookRouter, request_router_kwargs={"role": role.value})
    actor_options = actor_options_of(role, args, hosts)
    options = _options(role.value.capitalize(), request_router_config=router, ray_actor_options=actor_options)
    return serve.deployment(name=role.value.capitalize(), **options)(adapter).bind(
        args, service, pool.threads, pool.cores
    )


def actor_options_of(role: Role, args: ClusterArgs, hosts: Hosts) -> dict[str, Any]:
    """Where a replica of this pool may run, and what it takes there."""
    options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    if f"{role.value}_pool" in hosts.resources:
        options["resources"] = {f"{role.value}_pool": 1}
    if args.device == "cuda":
        options |= {"num_cpus": 1, "num_gpus": 1 if role is Role.ENCODE else args.tensor_parallel_size}
    if role.value in hosts.pool_labels:
        options["label_selector"] = {"pool": role.value}
    return options


def _options(name: str, **more: Any) -> dict[str, Any]:
    return {
        "num_replicas": 1,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "ray_actor_options": {
            "num_cpus": 0
        },  # torch's threads are set per pool; Ray's cores are for counting only
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": DRAIN_TIMEOUT_S,
        "logging_config": LoggingConfig(log_level="WARNING", enable_access_log=False),
        **more,
    }
