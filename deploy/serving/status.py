"""Serve's report of a starting application as lines for the operator: which pools load, which are ready, what
failed and why.

The driver (`driver`) writes the report into a file, and `epdg serve` reads it. `StartProgress` turns
successive reports into lines. At the first sign of a failure it raises `ClusterFailed`, although Serve would
still retry. Imports no Ray.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATUS_NAME = "status.json"
PLAIN_START = "started as by `serve run`, slower and without repair of Ray's own processes: "  # in the log
HEALTH_TIMEOUT_S = 10.0  # each one that passes leaves a line in Serve's log
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit))(?:: (.*))?$")
_BY_NAME_ALONE = ("ConfigError",)  # our own messages need no class name
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_FAILED_ONCE = "failed to start"  # in a deployment's message while Serve retries


class ClusterFailed(RuntimeError):
    """The message is one line; the cluster's logs have the rest."""


def write_status(folder: Path, applications: Mapping[str, Any]) -> None:
    """Replaces the status in `folder`. A reader sees the one or the other."""
    fresh = folder / f"{STATUS_NAME}.new"
    fresh.write_text(json.dumps(applications))
    fresh.replace(folder / STATUS_NAME)


def read_status(folder: Path) -> Mapping[str, Any]:
    """The applications by name; empty until there is a status."""
    try:
        return json.loads((folder / STATUS_NAME).read_bytes())
    except FileNotFoundError:
        return {}


class StartProgress:
    def __init__(self) -> None:
        self._loading_since: dict[str, float] = {}
        self._ready: set[str] = set()

    def update(self, applications: Mapping[str, Any], now: float) -> list[str]:
        """Lines for everything that has changed since the last call. `now`: Unix time. Raises
        ClusterFailed."""
        lines = []
        for application in applications.values():
            for name, deployment in application.get("deployments", {}).items():
                lines += self._of_deployment(name.lower(), deployment, now)
            if application.get("status") in _FAILED:
                raise ClusterFailed(own_message(application.get("message", "")))
        return lines

    def _of_deployment(self, pool: str, deployment: Mapping[str, Any], now: float) -> list[str]:
        message = deployment.get("message", "")
        if deployment.get("status") in _FAILED or _FAILED_ONCE in message:
            raise ClusterFailed(f"{pool}: {own_message(message)}")
        replicas = deployment.get("replicas", [])
        lines = []
        if replicas and pool not in self._loading_since:
            self._loading_since[pool] = min(replica.get("start_time_s", now) for replica in replicas)
            lines.append(f"{pool}: loading …")
        num_running = sum(replica.get("state") == "RUNNING" for replica in replicas)
        if pool not in self._ready and 0 < deployment.get("target_num_replicas", 0) <= num_running:
            self._ready.add(pool)
            lines.append(f"{pool}: ready in {now - self._loading_since[pool]:.1f} s")
        return lines


def are_running(applications: Mapping[str, Any]) -> bool:
    return bool(applications) and all(each.get("status") == "RUNNING" for each in applications.values())


def is_healthy(url: str) -> bool:
    """Whether a door answers there that it has workers for every phase."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def own_message(text: str) -> str:
    """The message of the innermost error of a traceback, in one line. Of a text without a traceback: its last
    line."""
    lines = _COLOUR.sub("", text).rstrip().splitlines()
    found = [(number, match) for number, line in enumerate(lines) if (match := _ERROR_LINE.match(line))]
    if not found:
        return lines[-1].strip() if lines else "no reason given; see the logs"
    number, match = found[-1]
    said = [match[2] or "", *lines[number + 1 :]]
    message = "; ".join(part for line in said if (part := " ".join(line.split()))).replace(":; ", ": ")
    return message if match[1] in _BY_NAME_ALONE and message else f"{match[1]}: {message}".rstrip(": ")
