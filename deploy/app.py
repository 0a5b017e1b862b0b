"""The composition root: from a configuration to a Serve application: a deployment for each of the `roles`
(Encode, Prefill, Decode, Language, EncodePrefill, Whole), and Door.

`serve run deploy/cluster.yaml` calls `build` with that file's `args`. The file's `deployments:` section
overrides what is set here per deployment (replica counts, resources). This module builds no model: model code
is imported in the replicas only. A model that takes no media gets no Encode deployment. Serve refuses a file
that names a missing deployment. A file for all models therefore names Encode only if it changes something
there.

The hosts' offers at composition time keep the pools apart:

* If a host of the cluster has a custom resource with a role's name and `_pool`, as `encode_pool` (`make
  serve` gives those of the first three roles to its own host), each replica of that pool takes one unit and
  runs only on such hosts.
* If a host has the label `pool=` with a role's name, replicas of that pool run only on hosts with the label.
* With `device: cuda` a replica takes one GPU for each of its ranks.
* A machine that offers none of these still runs everything.
"""

# No `from __future__ import annotations`: Serve validates the arguments with the class in `build`'s
# annotation.

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.config import ClusterArgs, read_environment, resolve
from cluster.config.checkpoint import check_family, check_weights, read_config, takes_media
from cluster.config.combinations import check_combination
from cluster.types.members import Role
from deploy.services import SERVICES
from deploy.serving.door import DoorReplica
from deploy.serving.exposure import require_authentication
from deploy.serving.held_check import HOLD_S
from deploy.serving.hook_router import HookRouter
from deploy.serving.replicas import DecodeReplica, Replica

logger = logging.getLogger(__name__)

# Import paths, as of `SERVICES`
DOOR = "router.door:Door"
API = "router.api.app:build_api"

# The engines admit and refuse requests. Serve's default of 5 would queue requests that the engines do not
# see.
MAX_ONGOING_REQUESTS = 1_000_000
# A check stays open for HOLD_S, and the next one follows at once (`deploy.serving.held_check`).
HEALTH_CHECK_PERIOD_S = HOLD_S / 2
HEALTH_CHECK_TIMEOUT_S = HOLD_S + 4.0  # a replica that does not answer three in a row is replaced
# Time for a worker that is being removed to finish its requests and stop. Other workers take over the rest.
DRAIN_TIMEOUT_S = 20.0
# No door can take over another's answers: one that is being removed goes on with them for as long as a
# request may last, and for this time more. It stops as soon as it has none.
DOOR_STOP_S = 10.0


@dataclass(frozen=True)
class Hosts:
    """What the alive hosts of the cluster offer now."""

    resources: frozenset[str]
    pool_labels: frozenset[str]  # values of the label `pool`

    @classmethod
    def here(cls) -> "Hosts":
        labels = (node.get("Labels", {}).get("pool") for node in ray.nodes() if node["Alive"])
        return cls(frozenset(ray.cluster_resources()), frozenset(label for label in labels if label))


def build(args: ClusterArgs) -> serve.Application:
    """Raises ConfigError for a model or setting that cannot work, and for a Ray cluster that is reachable
    without a token."""
    require_authentication(ray.util.get_node_ip_address(), read_environment())
    return compose(args, Hosts.here())


def compose(args: ClusterArgs, hosts: Hosts) -> serve.Application:
    """`build` on these hosts."""
    resolved = resolve(args, read_environment(), num_cores=len(os.sched_getaffinity(0)))
    config = read_config(resolved.model)  # the door checks the tokenizer: to read a large one takes a while
    check_family(config)
    check_weights(Path(resolved.model))
    check_combination(resolved)
    roles = [role for role in resolved.roles if role is not Role.ENCODE or takes_media(config)]
    if len(roles) < len(resolved.roles):
        logger.warning("model type '%s' takes no media: there is no encode pool", config["model_type"])
    pools = {role.value: _pool(role, resolved, hosts) for role in roles}
    options = _options("Door", graceful_shutdown_timeout_s=resolved.door.request_timeout_s + DOOR_STOP_S)
    return serve.deployment(name="Door", **options)(DoorReplica).bind(resolved, DOOR, API, pools)


def _pool(role: Role, args: ClusterArgs, hosts: Hosts) -> Any:
    pool = args.pools[role.value]
    adapter = DecodeReplica if role.decodes else Replica
    # Ray types each keyword of this class as a dict
    hook = cast(Any, HookRouter)
    router = RequestRouterConfig(request_router_class=hook, request_router_kwargs={"role": role.value})
    actor_options = actor_options_of(role, args, hosts)
    options = _options(role.deployment, request_router_config=router, ray_actor_options=actor_options)
    return serve.deployment(name=role.deployment, **options)(adapter).bind(
        args, SERVICES[role], pool.threads, pool.cores
    )


def actor_options_of(role: Role, args: ClusterArgs, hosts: Hosts) -> dict[str, Any]:
    """Where a replica of this pool may run, and which resources it takes there."""
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
        # torch's threads are set per pool; Ray's cores are only a count
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": DRAIN_TIMEOUT_S,
        "logging_config": LoggingConfig(log_level="WARNING", enable_access_log=False),
        **more,
    }
