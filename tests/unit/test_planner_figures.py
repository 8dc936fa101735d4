"""The figures of benchmarks/planner.md, on runs whose figures are worked out by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from test_planner_anatomy import a_job

from benchmarks.planner import figures, fits, page, picture
from benchmarks.planner.figures import Case
from benchmarks.planner.names import short
from samecurve.planner import fitting, step_time
from samecurve.planner.fitting import Measured
from samecurve.planner.layout import Layout
from samecurve.planner.profiles import Profile


def case(source: str, seconds: float, predicted: float, status: str = "ran", fitting: bool = True, **keys) -> Case:
    row = {"source": source, "model": "M", "gpus": "8", "gpu": "H100", "seq": "4096", "global_batch": "256"}
    row |= {"status": status, "oom_evidence": "states" if status == "oom" else ""}
    ran = seconds if status == "ran" else None
    intervals = {"seconds_interval": (0.9 * predicted, 1.1 * predicted), "memory_interval": (30, 50)}
    return Case(row, source, True, ran, keys.get("held"), ran, predicted, 40, fitting, **intervals)


CASES = [
    case("a", 10, 12, held=50), case("a", 10, 8), case("a", 10, 11), case("a", 5, 9), case("b", 10, 10.5, held=80),
    case("b", 10, 15, "oom", True), case("b", 10, 15, "oom", False), case("b", 20, 7, "ran", False),
]  # fmt: skip


def test_errors_by_source():
    """Of a: 20, 20, 10 and 80 %, the median of which is 20; of b 5 and 65 %, the median 35."""
    assert figures.middle(figures.times(CASES[:4])) == pytest.approx(0.2)
    assert figures.high(figures.times(CASES[:4])) == pytest.approx(0.8)
    assert figures.mean_of_sources(CASES, figures.times) == pytest.approx((0.2 + 0.35) / 2)
    assert figures.mean_of_sources(CASES, figures.memories) == pytest.approx((0.2 + 0.5) / 2)


def test_what_is_predicted_to_fit():
    assert figures.missed(CASES) == {"states": [True, False]}
    assert figures.flagged(CASES) == [False] * 5 + [True]


def test_coverage():
    """Intervals of 10 %: 10 is in 9.9 to 12.1 (11) and in 9.45 to 11.55 (10.5); 50 GiB is the end of an interval."""
    assert figures.coverage(CASES) == (pytest.approx(2 / 6), 0.5)


def test_regret_of_the_first_choice():
    """The fastest prediction of a takes 10 s, the best run 5; in b, fewer than three ran."""
    assert figures.regrets(CASES) == {"a, M, 8, H100, 4096, 256": 0.5}
    tempting = case("a", 1, 3, "oom")
    assert list(figures.regrets([*CASES, tempting]).values()) == [figures.MOST]


def test_the_page_and_the_picture_have_every_source():
    inside = [fits.LeftOut(Measured(a_job(), "a", 3.0, 50.0), True, Profile())]
    text, drawn = page.page(CASES, inside, "planner.svg"), picture.draw(CASES)
    assert "| a | 4 | 20.0 | 80.0 | +15.0 | 1 | 20.0 | 20.0 | -20.0 |" in text
    assert "| out of memory, states | 2 | 1 | 50.0 % |" in text
    root = ElementTree.fromstring(drawn)
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 6 + 2 + 2  # times, memory and the legend


def test_short_names_stay_different():
    names = ["mosaicml/llm-foundry MPT benchmarks: A100 40GB with 1600 Gbps node-node interconnect (RoCE)", fits.GRID]
    assert [short(name) for name in names] == ["llm-foundry A100 40GB", "Playbook grid"]


def test_a_left_out_source_does_not_change_its_own_constants(monkeypatch):
    """A source that is slower bends the constants of the others' folds, never those of its own."""
    monkeypatch.setattr(fitting, "ENOUGH", 1.0)
    job = a_job(layout=Layout(1), stack="nanotron")
    seconds = step_time.breakdown(job, Profile()).total

    def runs(factor: float) -> list[Measured]:
        return [Measured(job, "a", seconds, None), Measured(job, "b", factor * seconds, None)]

    plain, slow = (fits.constants_without(runs(factor)) for factor in (1, 1.3))
    assert slow["b"] == plain["b"] and slow["a"] != plain["a"]
