"""Bars with labels, as SVG, for plans and for the reports of the benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, BAR = 760, 13  # of a file; from one bar to the next


def label(x: float, y: float, text: str) -> str:
    """Text whose base line is at y."""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def bar(x: float, y: float, width: float, colour: str, text: str) -> str:
    """The text stands behind it."""
    return box(x, y, width, BAR - 2, colour) + "\n" + label(x + width + 5, y + BAR - 3, text)


def svg(height: float, body: Sequence[str]) -> str:
    """A whole file on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
