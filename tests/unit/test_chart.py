import math
import re
from xml.etree import ElementTree

import pytest

from samecurve.reports.chart import DIFFERENT, SAME, WIDTH, Curve, chart, linear_ticks, relative_difference, step_ticks

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [(1, 6.0), (2, 5.0), (3, 4.0)]
CURVES = [Curve("single", 0.0), Curve("ddp <2>", 1e-6), Curve("broken", math.inf)]


def test_the_reference_is_drawn_and_others_are_bars():
    root = ElementTree.fromstring(chart(POINTS, CURVES, "a & b", 1e-5))
    (line,) = root.iter(f"{SVG}polyline")
    assert len(re.findall(r"[\d.]+,[\d.]+", line.get("points"))) == 3
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"ddp <2>", "broken", "a & b: loss under single", "tolerance 1e-05"} <= set(texts)
    _, agrees, differs = root.iter(f"{SVG}rect")  # the first one is the paper
    # of 1e-10 to 1e-2 on 280 units: 1e-6 is in the middle, and 1 is cut off at the end
    assert (float(agrees.get("width")), float(differs.get("width"))) == pytest.approx((140, 280), abs=0.1)
    assert (agrees.get("fill"), differs.get("fill")) == (SAME, DIFFERENT)


def test_points_by_hand():
    """Loss ticks are 4, 4.5, ... 6: 6 is at the top of the plot (34), 4 at its bottom (234), 5 in the middle."""
    root = ElementTree.fromstring(chart(POINTS, CURVES[:1], "t", 1e-5))
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "60.0,34.0 225.0,134.0 390.0,234.0"


def test_no_texts_overlap():
    """By the width of a character: no two texts of one line meet, with as many strategies as there are."""
    names = [f"pipeline_interleaved_{index}" for index in range(26)]
    curves = [Curve(name, 1e-6 * index) for index, name in enumerate(["single", *names])]
    boxes = []
    for text in ElementTree.fromstring(chart(POINTS, curves, "quickstart", 1e-5)).iter(f"{SVG}text"):
        width, x, y = 6.6 * len(text.text), float(text.get("x")), float(text.get("y"))
        left = x - {"end": width, "middle": width / 2}.get(text.get("text-anchor"), 0)
        boxes.append((y, left, left + width, text.text))
    for index, (y, left, right, name) in enumerate(boxes):
        assert left >= 0 and right <= WIDTH, name
        assert not [other for y2, a, b, other in boxes[:index] if abs(y - y2) < 11 and left < b and a < right], name


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
    pairs = [(1.1, 1.0), (2.0, 2.0), (None, 3.0), (0.0, 0.0), (1.0, 0.0)]
    assert [relative_difference(*pair) for pair in pairs] == [pytest.approx(0.1), 0.0, None, None, math.inf]
