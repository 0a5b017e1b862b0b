"""Reads Serve's configuration file. It refuses what Serve would ignore, or say late and in many lines:
unknown names, and values of another shape.

A ConfigError is one line that names the place. Imports no Ray; a test holds the names against Ray's schemas.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from cluster.errors import ConfigError

SECTIONS = (
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config",
    "tracing_config", "applications", "target_capacity",
)  # fmt: skip
HTTP_OPTIONS = (
    "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
    "ssl_keyfile_password", "ssl_ca_certs",
)  # fmt: skip
APPLICATION = (
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy",
    "args", "logging_config", "external_scaler_enabled",
)  # fmt: skip
DEPLOYMENT = (
    "name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config",
    "user_config", "autoscaling_config", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s",
    "health_check_period_s", "health_check_timeout_s", "ray_actor_options", "placement_group_bundles",
    "placement_group_strategy", "placement_group_bundle_label_selector", "max_replicas_per_node",
    "logging_config", "request_router_config", "gang_scheduling_config", "deployment_actors",
    "rolling_update_percentage", "max_surge_percent",
)  # fmt: skip


def read_serve_file(file: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not a Serve configuration."""
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("applications"), list):
        raise ConfigError(f"{file} is not a Serve configuration: it has no list of applications")
    if not content["applications"]:
        raise ConfigError(f"{file}: applications: the list is empty")
    for name in content:
        check_name(name, SECTIONS, f"{file}: section")
    _check_names(content.get("http_options") or {}, HTTP_OPTIONS, f"{file}: http_options")
    for application in content["applications"]:
        _check_names(application, APPLICATION, f"{file}: application")
        deployments = application.get("deployments") or []
        if not isinstance(deployments, list):
            raise ConfigError(f"{file}: deployments: {deployments!r} is not a list")
        for deployment in deployments:
            _check_deployment(deployment, f"{file}: deployment")
    return content


def address_of(content: Mapping[str, Any]) -> tuple[str, int]:
    """Host and port for HTTP in this file. Raises ConfigError."""
    options = content.get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    if not _is_count(port) or not 0 < port < 1 << 16:
        raise ConfigError(f"http_options.port: {port!r} is not a port")
    return str(host), port


def replica_counts(deployment: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of replicas that this deployment has at least, as far as the file says them."""
    scaling = deployment.get("autoscaling_config") or {}
    for value in (deployment.get("num_replicas"), scaling.get("min_replicas")):
        if _is_count(value):
            yield value


def check_name(name: object, known: Collection[str], what: str) -> None:
    """Raises ConfigError with the nearest known name."""
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"{what} '{name}' is unknown; {hint}")


def _check_names(value: object, known: Collection[str], what: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: {value!r} has no options")
    for name in value:
        check_name(name, known, f"{what}: option")


def _check_deployment(deployment: Any, what: str) -> None:
    _check_names(deployment, DEPLOYMENT, what)
    what = f"{what} '{deployment.get('name')}'"
    if not isinstance(deployment.get("autoscaling_config") or {}, dict):
        raise ConfigError(f"{what}: autoscaling_config: {deployment['autoscaling_config']!r} has no options")
    number = deployment.get("num_replicas")
    if number not in (None, "auto") and not (_is_count(number) and number > 0):
        raise ConfigError(f"{what}: num_replicas: {number!r} is neither a number from 1 on nor 'auto'")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
