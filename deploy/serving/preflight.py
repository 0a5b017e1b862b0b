"""Checks, before Ray starts, whether a Serve file, its settings, the model and this machine fit together.

`check` reads the file and the headers in the model folder and asks the kernel. It takes well under a second,
starts nothing and imports neither Ray nor torch. Its result, a `StartPlan`, is the file to run: the model as
an absolute path, without pools that the model does not need. Every ConfigError is one line.
"""

from __future__ import annotations

import copy
import errno
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.config import ClusterArgs, Environment, read_environment, resolve
from cluster.config.adapters import adapter_room
from cluster.config.checkpoint import Weights, check_checkpoint, kv_row_bytes, takes_media
from cluster.config.combinations import check_combination
from cluster.config.keys import read_key_file
from cluster.config.machine import available_memory, has_gpu, max_open_files
from cluster.errors import ConfigError
from cluster.native.variants import Variant, check_choice, runnable_variants
from cluster.types.members import Role
from deploy.serving.local_environment import HAPROXY_FILES, POOL_SLOTS
from deploy.serving.serve_file import address_of, check_name, read_serve_file, replica_counts

BUILDER = "deploy.app:build"
_GIB = 1 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StartPlan:
    content: Mapping[str, Any]  # of the Serve file to run
    notes: tuple[str, ...]  # for the operator


@dataclass(frozen=True)
class Machine:
    """What the checks need to know of the machine."""

    cores: Collection[int]
    available_memory: Callable[[], int] = available_memory
    has_gpu: Callable[[], bool] = has_gpu
    max_open_files: Callable[[], int] = max_open_files
    cpu_variants: Callable[[], tuple[Variant, ...]] = runnable_variants


def check(
    file: Path, variables: Mapping[str, str] | None = None, machine: Machine | None = None
) -> StartPlan:
    """Raises ConfigError, which says what to change. Blocks while a model named by its hub id is
    downloaded."""
    content = copy.deepcopy(read_serve_file(file))
    check_port(*address_of(content))
    notes: list[str] = []
    for application in content["applications"]:
        if application.get("import_path") == BUILDER:
            notes += _complete(
                application, file, read_environment(variables), machine or Machine(os.sched_getaffinity(0))
            )
    return StartPlan(content, tuple(notes))


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if no server can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"something listens on {host}:{port} already"
            else:
                reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError(f"{reason} (http_options.port)") from error


def _complete(
    application: dict[str, Any], file: Path, environment: Environment, machine: Machine
) -> list[str]:
    """Checks one application that `deploy.app` builds and fills in what is known now. Returns notes for the
    operator."""
    args = _settings(application.get("args") or {}, file)
    resolved = resolve(args, environment, num_cores=len(machine.cores))
    config, weights = check_checkpoint(Path(resolved.model))
    adapter_room(resolved)
    _check_machine(resolved, environment, machine)
    check_memory(resolved, config, weights, machine)
    if key_file := resolved.door.access.key_file:
        read_key_file(Path(key_file))
    application["args"] = {
        **(application.get("args") or {}), "model": resolved.model, "model_id": resolved.model_id,
    }  # fmt: skip
    if resolved.adapters:
        application["args"]["adapters"] = resolved.adapters
    if resolved.adapters_folder:
        application["args"]["adapters_folder"] = resolved.adapters_folder
    if key_file:
        application["args"]["door"]["access"]["key_file"] = key_file
    if draft := resolved.decode.speculation.model:
        if resolved.decode.speculation.method == "draft":
            check_checkpoint(Path(draft))
        application["args"]["decode"]["speculation"]["model"] = draft
    check_combination(resolved)
    needs_no_encoder = Role.ENCODE in resolved.roles and not takes_media(config)
    return _quantised_note(resolved, weights, machine) + _check_deployments(
        application,
        file,
        resolved.roles,
        model_without_media=config["model_type"] if needs_no_encoder else None,
    )


def _settings(args: Mapping[str, Any], file: Path) -> ClusterArgs:
    try:
        return ClusterArgs.model_validate(args)
    except ValidationError as error:
        first, *others = error.errors()
        path = ".".join(str(part) for part in ("args", *first["loc"]))
        given = "" if first["type"] == "value_error" else f" (given: {first['input']!r})"
        more = f"; and {len(others)} more" if others else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{file}: {path}: {reason}{given}{more}") from error


def _check_machine(args: ClusterArgs, environment: Environment, machine: Machine) -> None:
    check_choice(args.cpu_kernels, machine.cpu_variants())
    if (limit := machine.max_open_files()) < HAPROXY_FILES:
        raise ConfigError(
            f"a process may open {limit:,} files at once, HAProxy needs {HAPROXY_FILES:,}: raise the hard "
            f"limit (`ulimit -Hn`; of a container: `--ulimit nofile=65536`)"
        )
    if args.device == "cuda" and not machine.has_gpu():
        raise ConfigError("the configuration asks for CUDA, but this machine has no GPU", param="device")
    if args.weight_dtype != "auto" and _is_on_gpu(args, machine):
        raise ConfigError(
            f"weight_dtype {args.weight_dtype} is for CPUs, and this machine has a GPU: set device cpu",
            param="weight_dtype",
        )
    for name, pool in args.pools.items():
        if strange := sorted(set(pool.cores).difference(machine.cores)):
            raise ConfigError(
                f"{name}.cores: {strange} are not among this machine's {sorted(machine.cores)}", param="cores"
            )
    if args.side_channel == "tcp" and not environment.cluster_secret:
        raise ConfigError("side_channel tcp needs EPDG_CLUSTER_SECRET", param="side_channel")


def check_memory(args: ClusterArgs, config: Mapping[str, Any], weights: Weights, machine: Machine) -> None:
    """A lower bound, on CPUs, of what cluster/worker/memory_plan.py computes with the model in memory. Raises
    ConfigError if a pool cannot fit."""
    if _is_on_gpu(args, machine):
        return
    # A worker holds only one half of a multimodal checkpoint; how much that is, is not known here.
    weight_bytes = 0 if takes_media(config) else _weight_bytes(args, weights, machine)
    row_bytes = kv_row_bytes(config, 1 if args.kv_cache_dtype == "int8" else _item_bytes(args, machine))
    available = machine.available_memory()
    for name, num_blocks in args.cpu_kv_blocks.items():
        num_tokens = num_blocks * args.block_size
        if num_tokens * row_bytes + weight_bytes > available:
            raise ConfigError(
                f"{name} needs {num_tokens * row_bytes / _GIB:,.1f} GiB of KV ({name}.kv_blocks "
                f"{num_blocks:,} × {args.block_size} tokens × {row_bytes:,} bytes) and "
                f"{weight_bytes / _GIB:,.1f} GiB of weights; {available / _GIB:,.1f} GiB are available",
                param=f"{name}.kv_blocks",
            )


def _is_on_gpu(args: ClusterArgs, machine: Machine) -> bool:
    return args.device == "cuda" or (args.device == "auto" and machine.has_gpu())


def _item_bytes(args: ClusterArgs, machine: Machine) -> int:
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if _is_on_gpu(args, machine) else "float32"
    return _ITEM_BYTES[dtype]


def _weight_bytes(args: ClusterArgs, weights: Weights, machine: Machine) -> int:
    """The bytes of the whole checkpoint, as workers hold it."""
    return weights.num_parameters * (1 if args.weight_dtype == "int8" else _item_bytes(args, machine))


def _quantised_note(args: ClusterArgs, weights: Weights, machine: Machine) -> list[str]:
    if weights.quantisation is None:
        return []
    loaded_gib, stored_gib = _weight_bytes(args, weights, machine) / _GIB, weights.file_bytes / _GIB
    if _is_on_gpu(args, machine):
        return [
            f"the checkpoint is quantised ({weights.quantisation}): linears and experts of the language half "
            "keep their codes where our kernels serve, everything else is dequantised; the whole takes "
            f"{stored_gib:,.2f} to {loaded_gib:,.2f} GiB"
        ]
    return [
        f"the checkpoint is quantised ({weights.quantisation}): it is dequantised while it is read, and "
        f"takes {loaded_gib:,.2f} GiB instead of {stored_gib:,.2f} GiB"
    ]


def _check_deployments(
    application: dict[str, Any], file: Path, roles: Sequence[Role], *, model_without_media: str | None
) -> list[str]:
    """Removes the deployment that a model without media does not need. Raises ConfigError for a name that
    Serve would refuse later, and for more replicas than this machine takes."""
    names = [*(role.deployment for role in roles), "Door"]
    kept = list(application.get("deployments") or [])
    for deployment in kept:
        check_name(deployment.get("name"), names, f"{file}: deployment")
        for number in replica_counts(deployment):
            if number > POOL_SLOTS:
                raise ConfigError(
                    f"{file}: {deployment['name']}: {number} replicas; "
                    f"this machine takes {POOL_SLOTS} of a pool"
                )
    if model_without_media is None:
        return []
    application["deployments"] = [each for each in kept if each["name"] != "Encode"]
    return [f"model type '{model_without_media}' takes no media: there is no encode pool"]
