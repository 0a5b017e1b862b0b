"""A Grafana board with Prometheus' answers as a page of HTML: rows, panels at their places, legends. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from bench.boards.chart import COLOURS, Line, Span, chart
from deploy.grafana import COLUMNS

WIDTH, GAP = 1440, 8
UNIT_WIDTH = (WIDTH - GAP) / COLUMNS
CHART_HEIGHT = 150
ROW = "row"
STYLE = f"""
body {{ margin: 0; padding: {GAP}px; width: {WIDTH - 2 * GAP}px; background: #f4f5f5 }}
body {{ color: #24292e; font: 12px sans-serif }}
header {{ display: flex; gap: 16px; align-items: baseline; padding: 6px 4px 10px }}
h1 {{ font-size: 20px; margin: 0 }}
h2 {{ font-size: 15px; margin: 6px 4px 0; grid-column: 1 / -1 }}
h2::before {{ content: "⌄ " }}
h3 {{ font-size: 13px; margin: 0 }}
header b {{ background: white; border: 1px solid #d2d6da; padding: 3px 8px; font-weight: normal }}
header i {{ margin-left: auto }}
i {{ color: #6b7178; font-style: normal }}
main {{ display: grid; grid-template-columns: repeat({COLUMNS}, 1fr); gap: {GAP}px }}
section {{ background: white; border: 1px solid #dfe3e6; padding: 6px 8px; overflow: hidden; min-width: 0 }}
section svg {{ display: block }}
ul {{ margin: 2px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 1px 12px; list-style: none }}
li::before {{ content: ""; display: inline-block; width: 12px; height: 3px; margin: 0 5px 3px 0 }}
li::before {{ background: var(--line) }}
.grid {{ stroke: #e4e7ea; fill: none }}
.line {{ fill: none; stroke-width: 1.5; stroke-linejoin: round }}
text {{ font-size: 11px; fill: #4a5158 }}
.y {{ text-anchor: end }}
.x, .none {{ text-anchor: middle }}
.none {{ font-size: 14px }}
"""


def queries(board: Mapping[str, Any], model: str, rate_interval: str) -> Iterator[tuple[str, str]]:
    """(panel and letter, expression) of each query, with the board's variables replaced as Grafana does."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", rate_interval).replace("$model", model)
            for variable in board["templating"]["list"]:
                if "current" in variable:
                    query = query.replace(f"${variable['name']}", variable["current"]["value"])
            yield f"{panel['title']} {target['refId']}", query


def lines_of(result: Sequence[Mapping[str, Any]], legend: str) -> list[Line]:
    """The lines of Prometheus' answer to a range query. `legend`: in Grafana's form, `{{label}}`."""
    found = []
    for series in result:

        def label(match: re.Match[str], labels: Mapping[str, str] = series["metric"]) -> str:
            return labels.get(match[1], "")

        name = re.sub(r"\{\{(\w+)\}\}", label, legend).strip()
        found.append(Line(name, [(float(at), float(value)) for at, value in series["values"]]))
    return sorted(found, key=lambda line: line.name)


Answers = Mapping[str, Sequence[Mapping[str, Any]]]  # to range queries, by their names in `queries`


def html(board: Mapping[str, Any], answers: Answers, span: Span, model: str, note: str) -> str:
    """`model`: that was asked for. `note`: stands at the right end of the head."""
    values = {"model": model} | {
        each["name"]: each["current"]["value"] for each in board["templating"]["list"] if "current" in each
    }
    shown = "".join(
        f"<b>{escape(each['label'])}: {escape(values[each['name']])}</b>"
        for each in board["templating"]["list"]
        if each["name"] in values
    )
    first, last = (
        datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") for at in (span.start, span.end)
    )
    panels = "".join(_panel(panel, answers, span) for panel in board["panels"])
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(board["title"])}</title>'
        f"<style>{STYLE}</style><header><h1>{escape(board['title'])}</h1>{shown}"
        f"<b>{first} to {last[-5:]} UTC</b><i>{escape(note)}</i></header><main>{panels}</main>"
    )


def _panel(panel: Mapping[str, Any], answers: Answers, span: Span) -> str:
    if panel["type"] == ROW:
        return f"<h2>{escape(panel['title'])}</h2>"
    defaults, columns = panel["fieldConfig"]["defaults"], panel["gridPos"]["w"]
    lines = [
        line
        for target in panel["targets"]
        for line in lines_of(answers[f"{panel['title']} {target['refId']}"], target["legendFormat"])
    ]
    size = (round(columns * UNIT_WIDTH - GAP) - 18, CHART_HEIGHT)
    drawn = chart(lines, span, defaults["unit"], size, is_stacked="stacking" in defaults["custom"])
    legend = "".join(
        f'<li style="--line: {colour}">{escape(line.name)}</li>'
        for line, colour in zip(lines, itertools.cycle(COLOURS))
    )
    return (
        f'<section style="grid-column: {panel["gridPos"]["x"] + 1} / span {columns}">'
        f"<h3>{escape(panel['title'])}</h3><div><i>{escape(panel['description']) or '&nbsp;'}</i></div>"
        f"{drawn}<ul>{legend}</ul></section>"
    )
