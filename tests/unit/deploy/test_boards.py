"""Boards and alerts ask for metrics, labels and values that the code exports; every alert has a runbook."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from prometheus_client import Histogram

from cluster import errors
from cluster.types.members import Role
from deploy.boards import boards
from router.telemetry.metrics import DoorMetrics
from tests.unit.deploy.charts import CHART

METRICS = CHART.parents[1] / "docs" / "metrics.md"
OPERATIONS = CHART.parents[1] / "docs" / "operations.md"
SCRAPED = {"instance", "pod", "le"}  # labels that Prometheus and histograms add
_WORD = re.compile(r"\b(epdg_[a-z0-9_]+)\b")
_SELECTOR = re.compile(r"\b(epdg_[a-z0-9_]+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")


def _registered() -> dict[str, set[str]]:
    """Every series' name as Prometheus sees it → its labels, from docs/metrics.md. A test compares that
    page with the code."""
    rows = re.findall(r"^\| `(epdg_\w+)(?:\{([\w,]*)\})?` \| (\w+) \|", METRICS.read_text(), re.MULTILINE)
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        name + ending: set(filter(None, labels.split(",")))
        for name, labels, kind in rows
        for ending in endings.get(kind, ("",))
    }


REGISTERED = _registered()
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BOARDS = {path.stem: json.loads(path.read_text()) for path in (CHART / "dashboards").iterdir()}
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in ALERTS} | {
    f"{name}: {panel['title']} {target['refId']}": target["expr"]
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_and_labels_are_those_of_the_code(name: str):
    expression = EXPRESSIONS[name]
    metrics = set(_WORD.findall(expression))
    assert metrics and metrics <= REGISTERED.keys(), metrics - REGISTERED.keys()
    for metric, labels in _SELECTOR.findall(expression):
        named = {label for label, _ in _MATCHER.findall(labels)}
        assert named <= REGISTERED[metric] | SCRAPED, f"{metric} has no {named}"
    grouped = {label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",")} - {""}
    assert grouped <= SCRAPED.union(*(REGISTERED[metric] for metric in metrics)), grouped


def test_legends_and_texts_name_labels_that_their_query_leaves():
    for board in BOARDS.values():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                kept = SCRAPED.union(
                    *(set(each.replace(" ", "").split(",")) for each in _GROUPED.findall(target["expr"]))
                )
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, target
    for rule in ALERTS:
        kept = {label.strip() for labels in _GROUPED.findall(rule["expr"]) for label in labels.split(",")}
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= kept | SCRAPED, rule["alert"]


def test_values_that_queries_select_exist():
    """Reasons of requests are names of errors, buckets those of the histogram, pools are roles."""
    for expression in EXPRESSIONS.values():
        for _, labels in _SELECTOR.findall(expression):
            for label, value in _MATCHER.findall(labels):
                values = set(value.split("|"))
                if label == "finished_reason":
                    assert all(issubclass(getattr(errors, each), errors.ClusterError) for each in values)
                if label == "pool":
                    assert values <= {role.value for role in Role}
    (target,) = [each for each in BOARDS["overview"]["templating"]["list"] if each["name"] == "target"]
    door = DoorMetrics("model", list, MagicMock())
    assert isinstance(door.ttft_s, Histogram)
    bounds = {str(bound) for bound in door.ttft_s._upper_bounds}
    assert set(target["query"].split(",")) <= bounds


def test_there_is_a_board_for_every_role_and_its_variables_are_defined():
    assert BOARDS.keys() == {"overview", *(role.value.replace("_", "-") for role in Role)}
    assert boards() == BOARDS
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        text = json.dumps(board)
        used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
        assert used <= {variable["name"] for variable in board["templating"]["list"]}


def test_panels_do_not_overlap():
    for board in BOARDS.values():
        places = [panel["gridPos"] for panel in board["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_every_alert_has_a_runbook():
    text = OPERATIONS.read_text().partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(Epdg\w+)` \|", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


@pytest.mark.skipif(find_spec("promql_parser") is None, reason="the package promql-parser is not installed")
def test_prometheus_can_parse_every_query():
    import promql_parser

    for expression in EXPRESSIONS.values():
        assert promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$", ""))
