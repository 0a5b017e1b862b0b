"""The composition root: configuration → Serve application of four deployments, Encode, Prefill, Decode and Door.

`serve run deploy/cluster.yaml` calls `build` with that file's `args`; the file's `deployments:` section overrides what is
set here per deployment (replica counts, resources). Builds nothing itself: model code is imported in the replicas only.
A deployment that the model has no use for (Encode of a text model) is left out.

Pools are kept apart by what hosts offer. Where a host of the cluster has a custom resource `encode_pool`, `prefill_pool` or
`decode_pool` (`make serve` gives them to its own host), that pool's replicas take one each and run only there. On GPU hosts
deploy/cluster-gpu.yaml asks for `num_gpus` and labels instead. A machine that offers nothing still runs everything.
"""

# No `from __future__ import annotations`: Serve reads `build`'s annotation as a class to validate the arguments with.

import json
import os
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cluster.config import ClusterArgs, read_environment, resolve
from cluster.serving.door import DoorReplica
from cluster.serving.hook_router import HookRouter
from cluster.serving.replicas import DecodeReplica, Replica
from cluster.types.members import Role

SERVICES = {
    Role.ENCODE: "encoder_service.service:EncoderService",
    Role.PREFILL: "prefill_service.service:PrefillService",
    Role.DECODE: "decode_service.service:DecodeService",
}
DOOR = "router.door:Door"
API = "router.openai.app:build_api"

MAX_ONGOING_REQUESTS = (
    1_000_000  # the engines admit and refuse; Serve's default of 5 would queue behind their backs
)
HEALTH_CHECK_PERIOD_S = 5.0  # doors notice a death at once, by end-of-file; Serve replaces it this much later
HEALTH_CHECK_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 20.0  # a replica that must go may finish its requests for this long


def build(args: ClusterArgs) -> serve.Application:
    """Raises ConfigError for a model or setting that cannot work."""
    return compose(args)


def compose(
    args: ClusterArgs, services: dict[Role, str] = SERVICES, door: str = DOOR, api: str = API
) -> serve.Application:
    """`build` with other rooms in the same frame: import paths of the classes, so that no process loads what it does not run."""
    resolved = resolve(args, read_environment(), num_cores=len(os.sched_getaffinity(0)))
    roles = [role for role in Role if role is not Role.ENCODE or _has_encoder(Path(resolved.model))]
    pools = [_pool(role, resolved, services[role]) for role in roles]
    options = _options("Door")
    return serve.deployment(name="Door", **options)(DoorReplica).bind(resolved, door, api, pools)


def _pool(role: Role, args: ClusterArgs, service: str) -> Any:
    pool = {Role.ENCODE: args.encode, Role.PREFILL: args.prefill, Role.DECODE: args.decode}[role]
    adapter = DecodeReplica if role is Role.DECODE else Replica
    router = RequestRouterConfig(request_router_class=HookRouter, request_router_kwargs={"role": role.value})
    resources = {f"{role.value}_pool": 1} if f"{role.value}_pool" in ray.cluster_resources() else {}
    actor_options = {"num_cpus": 0, "resources": resources}
    options = _options(role.value.capitalize(), request_router_config=router, ray_actor_options=actor_options)
    return serve.deployment(name=role.value.capitalize(), **options)(adapter).bind(
        args, service, pool.threads, pool.cores
    )


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


def _has_encoder(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text())
    return any(key in config for key in ("vision_config", "audio_config"))
