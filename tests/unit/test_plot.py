"""Plots of one quantity over the steps: points by hand, gaps, spikes, many steps, marks."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from samecurve.cli import commands
from samecurve.reports.history import NUM_BUCKETS, History
from samecurve.reports.plot import COLOURS, MOST_BUCKETS, Mark, Scale, Series, loss_series, plot, session_marks, thinned
from samecurve.run.sessions import SessionRecord
from samecurve.storage import jsonl
from samecurve.storage.jsonl import MOST_RECORDS
from samecurve.storage.records import parse

SVG = "{http://www.w3.org/2000/svg}"


def lines(svg: str) -> list[str]:
    """The shapes of the series, without the axes."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return [path.get("d") for path in paths if path.get("stroke") in COLOURS and "," in path.get("d")]


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


EXTREMES = [(1e308, -1e308), (1e308, 5e-324), (5e-324, 5e-324), (1e308, 1e308), (10**308, -(10**308)), (1e308, 1.0)]
EXTREMES += [(0.0, 5e-324), (1.0, 1.0 + 2**-52), (-1e308, -5e-324), (1e301, 1e308), (1e-320, 1e-310), (math.inf, 1e308)]


@pytest.mark.parametrize("scale", [Scale(), Scale(from_zero=True), Scale(logarithmic=True)])
@pytest.mark.parametrize("values", EXTREMES)
def test_numbers_of_any_size_are_drawn(values, scale):
    history = History(({"step": step, "loss": value} for step, value in enumerate(values * 2, 1)), 4)
    for order in (values, values[::-1], (*values, 1.0)):
        series = [Series("a", list(enumerate(order, 1))), Series("b", history.smoothed["loss"])]
        svg = plot("loss", [*series, *loss_series(history)], scale=scale)
        shapes = [shape.get("d") for shape in ElementTree.fromstring(svg).iter(f"{SVG}path")]
        assert all(re.fullmatch(r"[MVHh ,.\d]+", shape) for shape in shapes) and lines(svg)


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


def test_a_history_keeps_spikes_and_sums_of_any_length():
    """Against the whole list: all of a short run; of a long one as many points and records whatever its length."""
    kept = []
    for num_steps in (NUM_BUCKETS, 40_000, 80_000):
        records = [
            {"step": step, "loss": step % 7 / 8, "tokens": step, "mfu": None, "samples": 8 * step}
            for step in range(1, num_steps + 1)
        ]
        records[num_steps // 3] |= {"loss": 50.0, "eval_loss": 2.0}
        records[num_steps // 2] |= {"loss": -50.0, "eval_loss": 1.0}
        history = History([*records, None], num_steps, start_step=num_steps - 20)
        raw = [(record["step"], record["loss"]) for record in records]
        assert set(history.curves["loss"]) <= set(raw) and (len(raw) > NUM_BUCKETS or history.curves["loss"] == raw)
        assert {(num_steps // 3 + 1, 50.0), (num_steps // 2 + 1, -50.0)} <= set(history.curves["loss"])
        assert history.curves["mfu"][0] == (1, None) and "mfu" not in history.ends and "samples" not in history.curves
        assert history.totals["tokens"] == num_steps * (num_steps + 1) // 2 and history.last == records[-1]
        assert history.ends["eval_loss"] == (2.0, 1.0) and history.lowest("eval_loss") == (1.0, num_steps // 2 + 1)
        assert (history.num_steps, history.num_damaged) == (num_steps, 1)
        sample = list(history.records)
        assert sample[0] == records[0] and sample[-1] == records[-1] and list(history.session) == records[-20:]
        kept.append((len(history.curves["loss"]), len(sample)))
    assert kept[0] == (NUM_BUCKETS, NUM_BUCKETS)
    assert all(points <= 2 * NUM_BUCKETS + 4 and sample <= MOST_RECORDS + 1 for points, sample in kept)


@pytest.mark.parametrize("command", ["report", "summary"])
def test_a_command_parses_each_line_once(command, tmp_path, monkeypatch, capsys):
    facts = {"strategy": "ddp", "strategy_path": None, "engine": "E", "precision": "fp32", "recipe_path": "r.yaml"}
    (tmp_path / "run.json").write_text(json.dumps(facts | {"world_size": 1, "overrides": []}))
    lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 3001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    parsed = Counter()
    monkeypatch.setattr(jsonl, "parse", lambda *given: parsed.update("a") or parse(*given))
    assert commands.main([command, str(tmp_path)]) == 0
    assert parsed.total() == len(lines) + 3  # the first, and from the end the last


def test_smoothed_by_hand():
    """Ten steps: the newest has a tenth of the weight, and the first is not pulled towards 0."""
    assert History([], 3).window == 10 and History([], 100_000).window == 2000
    history = History([{"step": step, "loss": loss} for step, loss in ((1, 8.0), (2, None), (3, 6.0))], 3)
    means = [(1, pytest.approx(8.0)), (2, None), (3, pytest.approx((0.09 * 8 + 0.1 * 6) / 0.19))]
    assert history.smoothed["loss"] == means


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
    assert [label.text for label in root.iter(f"{SVG}text") if label.get("font-size") == "10"] == ["1", "50", "101"]
