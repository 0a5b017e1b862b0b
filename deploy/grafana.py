"""A Grafana board as JSON, from rows of panels. Pure; `boards` says what stands in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

COLUMNS = 24  # of Grafana's grid
HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    title: str
    unit: str
    queries: Sequence[tuple[str, str]]  # expression, legend
    description: str = ""
    width: int = 8
    is_stacked: bool = False


Rows = Sequence[tuple[str, Sequence[Panel]]]


def board(uid: str, title: str, rows: Rows) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for name, content in rows:
        panels.append({"type": "row", "title": name, "collapsed": False, "gridPos": _place(0, y, COLUMNS, 1)})
        y += 1
        x = 0
        for panel in content:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, _place(x, y, panel.width, HEIGHT)))
            x += panel.width
        y += HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": uid,
        "title": title,
        "tags": ["epdg"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["epdg"], "title": "epdg", "asDropdown": True}],
        "templating": {"list": list(_variables(uid))},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {"fillOpacity": 8}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": stacking}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + idx), "expr": expr, "legendFormat": legend, "datasource": DATASOURCE}
            for idx, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _variables(uid: str) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    if uid == "epdg-overview":
        yield {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": DATASOURCE,
            "query": "label_values(epdg_prompt_tokens_total, model_name)",
            "refresh": 2,
        }
        yield {
            "name": "target",
            "label": "Target of the first token (s)",
            "type": "custom",
            "query": "0.25,0.5,1.0,2.5,5.0,10.0",
            "current": {"text": "1.0", "value": "1.0"},
        }
