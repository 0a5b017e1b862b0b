"""Pictures of the boards: every panel is drawn with its title, axes, unit and legend; gaps are gaps."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from bench.boards.chart import Line, Span, chart, shown, ticks
from bench.boards.page import html, lines_of, queries
from deploy.boards import boards

BOARDS = boards()
SPAN = Span(1_000_000_020.0, 1_000_000_200.0, 5.0)
SIZE = (460, 150)
LABELS = {"pool": "decode", "replica": "r1", "stage": "encode", "status": "200", "instance": "door"}
# What Prometheus answered to range queries: a rate that starts late, 0/0, a series that ends, a constant
RECORDED = [
    [{"metric": LABELS, "values": [[1_000_000_040 + 5 * i, "0.35"] for i in range(20)]}],
    [{"metric": LABELS, "values": [[1_000_000_020 + 5 * i, "NaN"] for i in range(36)]}],
    [
        {"metric": LABELS, "values": [[1_000_000_020 + 5 * i, str(1500.25 * i)] for i in range(9)]},
        {"metric": {}, "values": [[1_000_000_020, "0"], [1_000_000_025, "+Inf"], [1_000_000_200, "0"]]},
    ],
    [],
]


def drawn(name: str) -> tuple[str, list[ElementTree.Element]]:
    board = BOARDS[name]
    keys = [key for key, _ in queries(board, "demo_model", "20s")]
    answers = {key: RECORDED[idx % len(RECORDED)] for idx, key in enumerate(keys)}
    page = html(board, answers, SPAN, "demo_model", "a note")
    return page, [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page)]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_is_drawn_under_its_title(name: str):
    page, pictures = drawn(name)
    rows = [panel["title"] for panel in BOARDS[name]["panels"] if panel["type"] == "row"]
    panels = [panel["title"] for panel in BOARDS[name]["panels"] if panel["type"] != "row"]
    assert re.findall("<h2>(.*?)</h2>", page) == rows
    assert re.findall("<h3>(.*?)</h3>", page) == panels and len(pictures) == len(panels)
    assert BOARDS[name]["title"] in page and "a note" in page and "01:47 to 01:50 UTC" in page


@pytest.mark.parametrize("name", BOARDS)
def test_no_path_and_no_number_is_nan_or_infinite(name: str):
    page, pictures = drawn(name)
    assert not re.search(r"\b(nan|inf)\b", page, re.IGNORECASE)
    for picture in pictures:
        for path in picture.iter("path"):
            assert all(math.isfinite(float(number)) for number in re.findall(r"-?[\d.]+", path.attrib["d"]))


def test_the_variables_of_a_board_are_replaced():
    asked = dict(queries(BOARDS["overview"], "demo_model", "20s"))
    assert "$" not in "".join(asked.values())
    assert 'le="1.0"' in asked["First tokens within the target A"]
    assert asked["Tokens C"] == 'sum(rate(epdg_generation_tokens_total{model_name="demo_model"}[20s]))'


def test_a_legend_names_the_labels_of_its_series():
    (line,) = lines_of(RECORDED[0], "{{pool}} {{replica}} {{absent}}")
    assert line.name == "decode r1" and line.points[0] == (1_000_000_040.0, 0.35)


def test_points_that_are_missing_interrupt_a_line():
    values = [1.0, 2.0, math.nan, 3.0, 4.0]
    points = [(SPAN.start + 5 * idx, value) for idx, value in enumerate(values)]
    picture = chart([Line("a", points)], SPAN, "short", SIZE)
    assert len(re.findall('class="line"', picture)) == 2
    points = [(at, 1.0) for at in (SPAN.start, SPAN.start + 5, SPAN.start + 50, SPAN.start + 55)]
    assert len(re.findall('class="line"', chart([Line("a", points)], SPAN, "short", SIZE))) == 2


def test_stacked_lines_stand_on_each_other():
    """The second one is as high as both: at the top of the plot, where the largest tick is."""
    points = [(SPAN.start, 1.0), (SPAN.start + 5, 1.0)]
    picture = chart([Line("a", points), Line("b", points)], SPAN, "short", SIZE, is_stacked=True)
    first, second = re.findall(r'class="line" [^>]*d="M[\d.]+ ([\d.]+)L', picture)
    assert float(second) == 8.0 and float(first) == 8.0 + (150 - 8 - 22) / 2


def test_without_a_value_the_panel_says_so():
    assert "No data" in chart([], SPAN, "s", SIZE)
    assert "No data" in chart([Line("a", [(SPAN.start, math.nan)])], SPAN, "s", SIZE)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"), (0.25, "s", "250 ms"), (0.0005, "s", "500 µs"), (12.5, "s", "12.5 s"),
        (1500, "short", "1.5 K"), (1000, "short", "1 K"), (0.5, "short", "0.5"), (0.4, "percentunit", "40%"),
        (3 << 20, "bytes", "3 MiB"), (1024, "bytes", "1 KiB"), (2500, "Bps", "2.5 kB/s"),
        (0.2, "reqps", "0.2 req/s"), (2_000_000, "count:tokens/s", "2 M tokens/s"),
    ],
)  # fmt: skip
def test_values_are_written_in_their_unit(value: float, unit: str, text: str):
    assert shown(value, unit) == text


@pytest.mark.parametrize("largest", [0.0, 1e-6, 0.7, 1.0, 3.0, 4097.0, 9.99e8])
@pytest.mark.parametrize("unit", ["short", "bytes"])
def test_ticks_begin_at_zero_and_reach_the_largest_value(largest: float, unit: str):
    marks = ticks(largest, unit)
    assert marks[0] == 0 and marks[-1] >= largest and 2 <= len(marks) <= 6
    assert len({shown(mark, unit) for mark in marks}) == len(marks)
