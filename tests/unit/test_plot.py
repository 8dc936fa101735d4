"""Plots of one quantity over the steps: points by hand, gaps, spikes, many steps, marks."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from samecurve.reports.plot import MOST_BUCKETS, Mark, Scale, Series, plot, session_marks, smoothed, thinned, window
from samecurve.run.sessions import SessionRecord

SVG = "{http://www.w3.org/2000/svg}"


def lines(svg: str) -> list[str]:
    """The shapes of the series, without the axes."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return [path.get("d") for path in paths if path.get("class", "").startswith("run") and "," in path.get("d")]


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_points_by_hand():
    """Ticks 4, 4.5 ... 6; the plot reaches from (58, 34) to (424, 210)."""
    svg = plot("loss <a>", [Series("", [(1, 6.0), (2, 5.0), (3, 4.0)])])
    assert lines(svg) == ["M58.0,34.0 241.0,122.0 424.0,210.0"]
    assert texts(svg)[0] == "loss <a>"


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_not_finite_is_a_gap_and_a_point_alone_is_seen(missing):
    svg = plot("loss", [Series("", [(1, 6.0), (2, 6.0), (3, missing), (4, 4.0)])])
    assert lines(svg) == ["M58.0,34.0 180.0,34.0M424.0,210.0h0"]


@pytest.mark.parametrize("points", [[], [(1, None), (2, math.nan)]])
def test_nothing_finite_is_no_plot(points):
    assert plot("loss", [Series("", points)]) == ""


def test_a_thin_line_keeps_every_spike():
    values = [1.0] * 100_000
    values[77_777] = 50.0
    values[88_888] = -50.0
    [piece] = thinned(list(enumerate(values, 1)))
    assert len(piece) <= 2 * MOST_BUCKETS and piece == sorted(piece)
    assert (77_778, 50.0) in piece and (88_889, -50.0) in piece
    assert piece[0][0] == 1 and piece[-1][0] > 99_600


def test_a_thin_line_breaks_where_nothing_is_finite():
    values = [1.0] * 1000 + [None] * 1000 + [1.0] * 1000
    first, second = thinned(list(enumerate(values, 1)))
    assert first[-1][0] <= 1000 and second[0][0] > 2000


def test_smoothed_by_hand():
    """Ten steps: the newest has a tenth of the weight, and the first is not pulled towards 0."""
    assert window(3) == 10 and window(100_000) == 2000
    found = smoothed([(1, 8.0), (2, None), (3, 6.0)])
    assert found == [(1, pytest.approx(8.0)), (2, None), (3, pytest.approx((0.09 * 8 + 0.1 * 6) / 0.19))]


def test_scales():
    far = Scale(logarithmic=True)
    assert {"1e-03", "1e-02", "0.1", "1"} <= set(texts(plot("norm", [Series("", [(1, 0.002), (2, 0.9)])], scale=far)))
    assert "norm (logarithmic)" not in texts(plot("norm", [Series("", [(1, 0.0), (2, 0.9)])], scale=far))
    assert "0" in texts(plot("memory", [Series("", [(1, 7.5), (2, 7.6)])], scale=Scale(from_zero=True)))
    many = texts(plot("norm", [Series("", [(1, 1e-30), (2, 1e30)])], scale=far))
    assert len([text for text in many if re.match(r"1e[+-]\d+", text)]) <= 8


def session(start_step: int, strategy: str, world_size: int) -> SessionRecord:
    return SessionRecord({"start_step": start_step, "strategy": strategy, "world_size": world_size}, "failed")


def test_sessions_that_went_on_are_marked_once_per_step():
    known = [session(0, "ddp", 1), session(4, "fsdp", 2), session(6, "zero3", 4), session(6, "pipeline", 2)]
    marks = session_marks(known)
    assert [(mark.step, mark.label) for mark in marks] == [(5, "2"), (7, "3-4")]
    assert marks[1].tooltip == (
        "session 3 resumed after step 6: zero3, world size 4\nsession 4 resumed after step 6: pipeline, world size 2"
    )


def test_marks_lie_at_their_steps_and_labels_do_not_cover_each_other():
    marks = [Mark(step, str(step), f"told {step}") for step in (1, 50, 51, 101, 102)]
    svg = plot("loss", [Series("", [(1, 2.0), (101, 1.0)])], marks)
    root = ElementTree.fromstring(svg)
    told = [group.find(f"{SVG}title").text for group in root.iter(f"{SVG}g")]
    assert told == ["told 1", "told 50", "told 51", "told 101"]  # there is no step 102
    assert [group.find(f"{SVG}line").get("x1") for group in root.iter(f"{SVG}g")] == ["58.0", "237.3", "241.0", "424.0"]
    assert [label.text for label in root.iter(f"{SVG}text") if label.get("class") == "mark0"] == ["1", "50", "101"]
