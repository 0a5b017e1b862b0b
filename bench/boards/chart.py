"""A panel of a board as SVG: lines or stacked areas over time, with axes in the panel's unit. Pure.

Not a number, infinities and missing points are gaps, as in Grafana.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

COLOURS = (
    "#3274d9", "#e0752d", "#3f9f4a", "#b3448f", "#c4a000", "#0f9fb0", "#d8383f", "#7b61c9", "#7a5c3e",
    "#6b7785", "#9bbf3b", "#e58ac0",
)  # fmt: skip
TOP, RIGHT, BOTTOM = 8, 10, 22  # of the picture, around the plot
LETTER = 6.5  # width, in pixels
NUM_TICKS = 4
# Grafana's ids of units → factor between prefixes, prefixes, what stands behind them
SCALES: Mapping[str, tuple[float, Sequence[str], str]] = {
    "short": (1000, ("", " K", " M", " G"), ""),
    "bytes": (1024, (" B", " KiB", " MiB", " GiB"), ""),
    "Bps": (1000, (" B/s", " kB/s", " MB/s", " GB/s"), ""),
    "reqps": (1000, ("", " K", " M"), " req/s"),
}


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # (seconds since 1970, value)


class Span(NamedTuple):
    """The time that a chart shows, in seconds since 1970."""

    start: float
    end: float
    step: float  # between two points


def shown(value: float, unit: str) -> str:
    """The value as Grafana writes it. Raises KeyError for a unit that no board has."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        factor, name = next(
            (each for each in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if value * each[0] >= 1), (1, "s")
        )
        return f"{value * factor:.4g} {name}"
    kind, _, counted = unit.partition(":")
    base, prefixes, suffix = (*SCALES["short"][:2], f" {counted}") if kind == "count" else SCALES[unit]
    power = min(len(prefixes) - 1, int(math.log(max(value, 1), base) + 1e-9))
    return f"{value / base**power:.4g}{prefixes[power]}{suffix}"


def ticks(largest: float, unit: str) -> list[float]:
    """The ticks from 0 to at least `largest`, in steps of 1, 2 or 5 of the unit's powers."""
    if largest <= 0:
        return [0.0, 1.0]
    base = 1024.0 ** int(math.log(max(largest, 1), 1024)) if unit == "bytes" else 1.0
    rough = largest / base / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = base * power * next(each for each in (1, 2, 5, 10) if each * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(largest / step - 1e-9) + 1)]


def chart(
    lines: Sequence[Line], span: Span, unit: str, size: tuple[int, int], *, is_stacked: bool = False
) -> str:
    """`size`: width and height in pixels."""
    runs = list(_stacked(lines, span)) if is_stacked else [list(_runs(line, span)) for line in lines]
    tops = [value for each in runs for run in each for _, _, value in run]
    if not tops:
        width, height = size
        return f'{_open(size)}<text class="none" x="{width / 2}" y="{height / 2}">No data</text></svg>'
    marks = ticks(max(tops), unit)
    labels = [shown(mark, unit) for mark in marks]
    left = max(40, round(LETTER * max(map(len, labels)) + 14))
    width, height = size[0] - left - RIGHT, size[1] - TOP - BOTTOM

    def x(at: float) -> float:
        return left + width * (at - span.start) / (span.end - span.start)

    def y(value: float) -> float:
        return TOP + height * (1 - value / marks[-1])

    body = [_open(size)]
    for mark, text in zip(marks, labels, strict=True):
        body.append(
            f'<path class="grid" d="M{left} {y(mark):.1f}h{width}"/>'
            f'<text class="y" x="{left - 8}" y="{y(mark) + 4:.1f}">{text}</text>'
        )
    for at in _minutes(span):
        clock = datetime.fromtimestamp(at, UTC).strftime("%H:%M")
        body.append(
            f'<path class="grid" d="M{x(at):.1f} {TOP}v{height}"/>'
            f'<text class="x" x="{x(at):.1f}" y="{size[1] - 6}">{clock}</text>'
        )
    for each, colour in zip(runs, itertools.cycle(COLOURS)):
        for run in each:
            upper = "L".join(f"{x(at):.1f} {y(top):.1f}" for at, _, top in run)
            lower = "L".join(f"{x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(run))
            opacity = 0.5 if is_stacked else 0.07
            body.append(f'<path fill="{colour}" fill-opacity="{opacity}" d="M{upper}L{lower}Z"/>')
            body.append(f'<path class="line" stroke="{colour}" d="M{upper}"/>')
    return "".join(body) + "</svg>"


def _open(size: tuple[int, int]) -> str:
    return f'<svg width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">'


def _minutes(span: Span) -> Iterator[int]:
    """Whole minutes, so many that their labels have room."""
    every = 60 * math.ceil((span.end - span.start) / 60 / 8)
    return iter(range(math.ceil(span.start / every) * every, int(span.end) + 1, every))


def _runs(line: Line, span: Span) -> Iterator[list[tuple[float, float, float]]]:
    """(instant, lower edge, value) of points without a gap between them."""
    run: list[tuple[float, float, float]] = []
    for at, value in line.points:
        if run and (not math.isfinite(value) or at - run[-1][0] > 1.5 * span.step):
            yield run
            run = []
        if math.isfinite(value):
            run.append((at, 0.0, value))
    if run:
        yield run


def _stacked(lines: Sequence[Line], span: Span) -> Iterator[list[list[tuple[float, float, float]]]]:
    """Each line stands on those before it; a gap counts as 0."""
    instants = sorted({at for line in lines for at, value in line.points if math.isfinite(value)})
    below = dict.fromkeys(instants, 0.0)
    for line in lines:
        values = {at: value for at, value in line.points if math.isfinite(value)}
        above = {at: below[at] + values.get(at, 0.0) for at in instants}
        tops = Line(line.name, sorted(above.items()))
        yield [[(at, below[at], top) for at, _, top in run] for run in _runs(tops, span)]
        below = above
