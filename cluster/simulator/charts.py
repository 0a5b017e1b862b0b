"""Bars with labels, as SVG, for plans and for the reports of the benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape


def label(x: float, y: float, text: str) -> str:
    """At its base line."""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def svg(width: int, height: float, body: Sequence[str]) -> str:
    """A whole file on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{width}" height="{height:.0f}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
