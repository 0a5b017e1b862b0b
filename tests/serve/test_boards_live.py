"""Every panel of the boards has data: Prometheus scrapes a live cluster that has answered text and an image,
and is asked every query of the overview and of the pools that the cluster has."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.serving.launch import LocalCluster
from cluster.serving.ports import free_port
from tests.serve.test_replicas import HANG_S
from tests.unit.deploy.charts import CHART

PROMETHEUS = shutil.which("prometheus")
BOARDS = ("overview", "encode", "prefill", "decode")
IMAGES = CHART.parent / "demo_model" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None, reason="the program prometheus (Debian: prometheus) is not installed"
    ),
]


@pytest.fixture
def prometheus(cluster: LocalCluster, tmp_path: Path) -> Iterator[httpx.Client]:
    """Scrapes the door and Ray's own exporters every second."""
    targets = [{"targets": [cluster.url.removeprefix("http://")]}]
    (found,) = wait_for_targets(cluster.folder)
    jobs = [
        {"job_name": "epdg", "scrape_interval": "1s", "static_configs": targets},
        {"job_name": "ray", "scrape_interval": "1s", "file_sd_configs": [{"files": [str(found)]}]},
    ]
    (tmp_path / "prometheus.json").write_text(json.dumps({"scrape_configs": jobs}))
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={tmp_path / 'prometheus.json'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
                yield client
        finally:
            process.terminate()


def wait_for_targets(folder: Path) -> list[Path]:
    """Ray's dashboard writes them; it starts when the cluster is ready."""
    deadline = time.monotonic() + HANG_S
    while not (found := list(folder.glob("ray/session_2*/prom_metrics_service_discovery.json"))):
        assert time.monotonic() < deadline, "Ray's dashboard has written no targets"
        time.sleep(0.2)
    return found


def queries(model: str) -> dict[str, str]:
    found = {}
    for name in BOARDS:
        board = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$__rate_interval", "1m")
                query = query.replace("$model", model).replace("$target", "10.0")
                found[f"{name}: {panel['title']} {target['refId']}"] = query
    return found


def test_every_query_of_the_boards_returns_data(cluster_url, prometheus):
    model = httpx.get(f"{cluster_url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    missing = queries(model) | {
        f"Ray's dashboard: {name}": f"count({name}) >= {num_replicas}"
        for name, num_replicas in (
            ("ray_epdg_replica_busy_ratio", 3),
            ("ray_epdg_replica_memory_used_ratio", 3),
            ("ray_epdg_replica_requests_running", 3),
            ("ray_epdg_replica_requests_waiting", 3),
            ("ray_epdg_door_requests_running", 1),
            ("ray_epdg_door_requests_waiting", 1),
        )
    }
    for _ in range(120):  # rates need two scrapes, and one load report behind the last answer
        ask(cluster_url, model)
        missing = {name: query for name, query in missing.items() if not has_data(prometheus, query)}
        if not missing:
            return
        time.sleep(0.5)
    pytest.fail("no data: " + "\n".join(f"{name}: {query}" for name, query in missing.items()))


def has_data(prometheus: httpx.Client, query: str) -> bool:
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query})
    except httpx.ConnectError:  # it starts
        return False
    if answer.status_code == 503:
        return False
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["data"]["result"])


def ask(url: str, model: str) -> None:
    """A question about an image, and one that names no known model."""
    image = base64.b64encode(next(IMAGES.glob("*.png")).read_bytes()).decode()
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "What is this?"},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).status_code == 200
