"""Clusters of this machine for a measurement: a shipped configuration with changes, run by the product's own
code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.serving.command import DEFAULT_CONFIG
from deploy.serving.launch import LocalCluster
from deploy.serving.ports import free_port

READY_TIMEOUT_S = 300.0


def configuration(
    args: Mapping[str, Any] | None = None,
    replicas: Mapping[str, int] | None = None,
    *,
    base: Path = DEFAULT_CONFIG,
    port: int | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """`base` at a free port, because another cluster may answer at its own, or at this one. `args`: instead
    of the file's. `replicas`: by deployment; the others keep theirs. `sections`: of the file, replaced."""
    content = yaml.safe_load(base.read_text())
    content["http_options"] = {**content.get("http_options", {}), "port": port or free_port()}
    (application,) = content["applications"]
    if args is not None:
        application["args"] = dict(args)
    if replicas is not None:
        shipped = {"Encode": 1, **{each["name"]: each["num_replicas"] for each in application["deployments"]}}
        application["deployments"] = [
            {"name": name, "num_replicas": number} for name, number in {**shipped, **replicas}.items()
        ]
    return content | sections


def write(content: Mapping[str, Any], folder: Path) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False))
    return path


def settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Settings of `args` by dotted names: "prefill.kv_blocks=512" → {"prefill": {"kv_blocks": 512}}."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        *path, last = name.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = yaml.safe_load(value)
    return found


@contextmanager
def running(
    content: Mapping[str, Any], *, say: Callable[[str], None] = lambda line: None,
    ready_s: float = READY_TIMEOUT_S, **environment: str,
) -> Iterator[LocalCluster]:  # fmt: skip
    """A ready cluster; all of its processes end with the block. `say` gets lines of progress. Raises
    ClusterFailed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(write(content, Path(folder)), say=say, **environment) as cluster,
    ):
        cluster.wait_ready(ready_s)
        yield cluster
