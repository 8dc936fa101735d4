import re
from xml.etree import ElementTree

import pytest

from samecurve.reports.chart import COLOURS, Curve, chart, linear_ticks, relative_differences, step_ticks

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [
    Curve("single", [6.0, 5.0, 4.0]),
    Curve("ddp <2>", [6.0, 5.0 * (1 + 1e-6), 4.0]),
    Curve("broken", [6.0, None, 8.0]),
]


def test_every_curve_is_drawn_and_named():
    root = ElementTree.fromstring(chart(CURVES, "a & b", 1e-5))
    lines = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert lines == [*COLOURS[:3], *COLOURS[1:3]]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"single", "ddp <2>", "broken", "a & b: loss", "tolerance 1e-05"} <= set(texts)


def test_points_by_hand():
    """Loss ticks are 4, 4.5, ... 6: 6 is at the top of the plot (34), 4 at its bottom (300 - 44), 5 in the middle."""
    root = ElementTree.fromstring(chart(CURVES[:1], "t", 1e-5))
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "70.0,34.0 390.0,145.0 710.0,256.0"


def test_a_missing_value_is_a_gap_and_a_large_one_stays_inside():
    root = ElementTree.fromstring(chart(CURVES, "t", 1e-5))
    points = [re.findall(r"[\d.]+,([\d.]+)", line.get("points")) for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in points] == [3, 3, 2, 3, 2]
    # differences 0 and 1 lie on the bottom and on the top of the lower panel
    assert points[4] == ["556.0", "334.0"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (4.0, 6.0, [4.0, 4.5, 5.0, 5.5, 6.0]),
        (0.0, 120.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]),
        (3.0, 3.0, [3.0, 3.5]),
    ],
)
def test_linear_ticks(low, high, ticks):
    assert linear_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(("steps", "ticks"), [(20, [1, 5, 10, 15, 20]), (1, [1]), (3, [1, 2, 3])])
def test_step_ticks(steps, ticks):
    assert step_ticks(1, steps) == ticks


def test_relative_differences_by_hand():
    assert relative_differences([1.1, 2.0, None, 0.0], [1.0, 2.0, 3.0, 0.0]) == [pytest.approx(0.1), 0.0, None, 0.0]
