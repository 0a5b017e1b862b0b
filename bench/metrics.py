"""A cluster as its own HTTP endpoints report it: models, counters, and what it still holds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 30.0
HELD = (
    "epdg_door_flights",
    "epdg_worker_running",
    "epdg_worker_waiting",
    "epdg_worker_queued_units",
    "epdg_worker_used_blocks",
    "epdg_worker_open_leases",
    "epdg_worker_media_bytes",
    "epdg_worker_sending_bytes",
)


def model_id(url: str) -> str:
    """The name of the model that the cluster serves. Blocks; raises httpx.HTTPError."""
    models = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()
    return models["data"][0]["id"]


def page(url: str) -> str:
    """Prometheus text of one door. Blocks; raises httpx.HTTPError."""
    return httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).raise_for_status().text


def samples(text: str, *names: str) -> Iterator[Sample]:
    """The samples with one of these names."""
    for family in text_string_to_metric_families(text):
        yield from (sample for sample in family.samples if sample.name in names)


def counter(text: str, name: str, **labels: str) -> float | None:
    """The sum over all samples of this name that carry these labels; None if there are none."""
    values = [each.value for each in samples(text, name) if labels.items() <= each.labels.items()]
    return sum(values) if values else None


def grown(before: str, after: str, name: str, **labels: str) -> float | None:
    """The growth of a counter between two pages; None if the cluster does not have it."""
    last = counter(after, name, **labels)
    return None if last is None else last - (counter(before, name, **labels) or 0.0)


def held(text: str) -> dict[str, float]:
    """Every metric that must be zero in an idle cluster and is not, with its value."""
    return {f"{each.name}{each.labels}": each.value for each in samples(text, *HELD) if each.value != 0}


def wait_idle(url: str, timeout_s: float) -> dict[str, float]:
    """Blocks until nothing is held. Returns what is still held after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := held(page(url))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
