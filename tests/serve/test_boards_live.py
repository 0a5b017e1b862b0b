"""Every panel of the boards has data: Prometheus scrapes a live cluster that has answered text and an image,
and is asked every query of the overview and of the pools that the cluster has."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.boards.page import queries
from bench.boards.prometheus import BINARY, latest, prometheus
from deploy.serving.launch import LocalCluster
from tests.serve.test_replicas import GUARD_S, HANG_S
from tests.unit.deploy.charts import CHART

BOARDS = ("overview", "encode", "prefill", "decode")
IMAGES = CHART.parent / "demo_model" / "examples"
RAY_GAUGES = (
    ("ray_epdg_replica_busy_ratio", 3),
    ("ray_epdg_replica_memory_used_ratio", 3),
    ("ray_epdg_replica_requests_running", 3),
    ("ray_epdg_replica_requests_waiting", 3),
    ("ray_epdg_door_requests_running", 1),
    ("ray_epdg_door_requests_waiting", 1),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="the program prometheus (Debian: prometheus) is not installed"),
]


def all_queries(model: str) -> dict[str, str]:
    found = {f"Ray's exporter: {name}": f"count({name}) >= {num}" for name, num in RAY_GAUGES}
    for name in BOARDS:
        board = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
        found |= {f"{name}: {key}": query for key, query in queries(board, model, "1m")}
    return found


def test_every_query_of_the_boards_returns_data(cluster: LocalCluster, tmp_path: Path):
    model = httpx.get(f"{cluster.url}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    missing = all_queries(model)
    with prometheus(cluster, tmp_path, 1) as client:
        # rates need two scrapes and one load report behind the last answer, Ray's exporters its dashboard,
        # which starts late on a busy machine
        ends_at = time.monotonic() + GUARD_S
        while missing and time.monotonic() < ends_at:
            ask(cluster.url, model)
            missing = {name: query for name, query in missing.items() if not latest(client, query)}
            time.sleep(0.5)
    assert not missing, "no data: " + "\n".join(f"{name}: {query}" for name, query in missing.items())


def ask(url: str, model: str) -> None:
    """A question about an image."""
    image = base64.b64encode(next(IMAGES.glob("*.png")).read_bytes()).decode()
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "What is this?"},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).status_code == 200
