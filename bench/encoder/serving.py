"""The cluster under measurement: starts one on a free port, finds its processes by its URL, reads its
counters.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.engine.client import Endpoint
from bench.engine.processes import role_of
from deploy.serving.launch import LocalCluster, processes_of
from deploy.serving.ports import free_port

CONFIG = Path(__file__).parents[2] / "deploy" / "cluster.yaml"
ENCODER_ITEMS = "epdg_encoder_items_total"
CACHED_TOKENS = "epdg_prompt_tokens_cached_total"
TIMEOUT_S = 10.0
NO_END: Mapping[str, Any] = {"ignore_eos": False, "min_tokens": None}  # forces the length of an answer


def cluster_config(port: int, args: Mapping[str, Any], replicas: Mapping[str, int]) -> dict[str, Any]:
    """deploy/cluster.yaml at another port. `replicas`: by deployment; the others keep theirs."""
    config = yaml.safe_load(CONFIG.read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] = dict(args)
    shipped = {"Encode": 1, **{each["name"]: each["num_replicas"] for each in application["deployments"]}}
    application["deployments"] = [
        {"name": name, "num_replicas": number} for name, number in {**shipped, **replicas}.items()
    ]
    return config


def settings(pairs: list[str]) -> dict[str, Any]:
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
def running(args: Mapping[str, Any], replicas: Mapping[str, int]) -> Iterator[LocalCluster]:
    """A ready cluster on a free loopback port; all of its processes end with the block. Raises
    RuntimeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster_config(free_port(), args, replicas)))
        with LocalCluster(path) as cluster:
            cluster.wait_ready()
            yield cluster


def endpoint(url: str) -> Endpoint:
    """Blocks; raises httpx.HTTPError."""
    models = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()
    return Endpoint(url, models["data"][0]["id"], NO_END)


def read_metrics(url: str) -> str:
    """Prometheus text of one door. Blocks; raises httpx.HTTPError."""
    return httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text


def counter(metrics: str, name: str, **labels: str) -> float | None:
    """The sum over all samples of this name that carry these labels; None if there are none."""
    values = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(values) if values else None


def grown(before: str, after: str, name: str, **labels: str) -> float | None:
    """The growth of a counter between two scrapes; None if the cluster does not have it."""
    last = counter(after, name, **labels)
    return None if last is None else last - (counter(before, name, **labels) or 0.0)


def replicas(url: str) -> dict[str, list[int]]:
    """Process ids by role, of the cluster on this machine that listens at `url`. Raises RuntimeError if that
    port is not one of a cluster that `make serve` or `serve` has started.
    """
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            folder = psutil.Process(connection.pid).environ().get("RAY_TMPDIR") if connection.pid else None
            if folder is not None:
                return _by_role(processes_of(Path(folder)))
    raise RuntimeError(f"no cluster of this machine listens at {url}")


def _by_role(pids: list[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid in pids:
        found.setdefault(role_of(Path(f"/proc/{pid}/cmdline").read_bytes()), []).append(pid)
    return found


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
