"""The program `prometheus` (Debian: prometheus) next to a cluster of this machine, and its answers.

It scrapes the door, and Ray's own exporters as soon as Ray's dashboard has written where they are. Its data
go with the folder that the caller gives. Listens on loopback.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.boards.chart import Span
from deploy.serving.launch import LocalCluster
from deploy.serving.ports import free_port

BINARY = shutil.which("prometheus")
HANG_S = 60.0


@contextmanager
def prometheus(cluster: LocalCluster, folder: Path, scrape_s: int) -> Iterator[httpx.Client]:
    """A client of it. It has started and loaded its rules, but not necessarily scraped anything."""
    assert BINARY is not None
    interval = f"{scrape_s}s"
    door = [{"targets": [cluster.url.removeprefix("http://")]}]
    found = str(cluster.folder / "ray/session_latest/prom_metrics_service_discovery.json")
    ray = [{"files": [found], "refresh_interval": interval}]
    jobs = [
        {"job_name": "epdg", "scrape_interval": interval, "static_configs": door},
        {"job_name": "ray", "scrape_interval": interval, "file_sd_configs": ray},
    ]
    config, port = folder / "prometheus.json", free_port()
    config.write_text(json.dumps({"scrape_configs": jobs}))
    command = [
        BINARY,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
                _wait_ready(client)
                yield client
        finally:
            process.terminate()


def _wait_ready(client: httpx.Client) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + HANG_S
    while not _is_ready(client):
        if time.monotonic() > deadline:
            raise TimeoutError("Prometheus does not start")
        time.sleep(0.1)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.ConnectError:
        return False


def latest(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    """The series that it returns now."""
    return _result(client.get("/api/v1/query", params={"query": query}))


def over(client: httpx.Client, query: str, span: Span) -> list[dict[str, Any]]:
    """The series with their values over that time."""
    params = {"query": query, "start": span.start, "end": span.end, "step": span.step}
    return _result(client.get("/api/v1/query_range", params=params))


def _result(answer: httpx.Response) -> list[dict[str, Any]]:
    answer.raise_for_status()
    return answer.json()["data"]["result"]
