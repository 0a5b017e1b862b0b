"""Tables in Markdown, and the records of their cells. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.records import Record

Cells = dict[tuple[Any, ...], list[Record]]


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(*columns: str) -> list[str]:
    return [row(columns), row(["---"] * len(columns))]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [*head(*columns), *map(row, rows)]


def grouped(records: Iterable[Record], *names: str) -> Cells:
    """The records by the values of these fields; records that lack one are left out."""
    cells: Cells = {}
    for record in records:
        if all(name in record for name in names):
            cells.setdefault(tuple(record[name] for name in names), []).append(record)
    return cells


def paired_ratio(
    cell: Iterable[Record], other: Iterable[Record], value: Callable[[Record], float]
) -> float | None:
    """Median of cell / other over the repetitions that both have, so that drift over minutes cancels out.
    None: there are none."""
    others = {record["repetition"]: value(record) for record in other}
    pairs = [(value(each), others[each["repetition"]]) for each in cell if each["repetition"] in others]
    ratios = [mine / its for mine, its in pairs if its > 0]
    return statistics.median(ratios) if ratios else None


def median(cell: Sequence[Record], name: str) -> float:
    return statistics.median(record[name] for record in cell)
