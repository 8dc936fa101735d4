"""The figures of benchmarks/planner.md, on runs whose figures are worked out by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from test_planner_anatomy import a_job, strategy

from benchmarks.planner import cells, figures, fits, fitting, page, picture
from benchmarks.planner.figures import Case
from benchmarks.planner.fitting import Measured
from benchmarks.planner.names import short
from samecurve.planner import answers, step_time
from samecurve.planner.hardware import Profile

# the cells that describe a run; all of one job
ROW = dict.fromkeys(answers.NEEDED, "") | {"id": "1", "model": "M", "stack": "nanotron", "gpu": "H100", "seq": "4096"}
ROW |= {"global_batch": "256", "layers": "4", "hidden": "512", "heads": "8", "ffn": "2048", "vocab": "1000"}
ROW |= {"mlp": "gelu", "micro_batch": "1", "grad_accum": "32", "dp": "8", "precision": "bf16", "gpu_memory_gib": "80"}


def case(source: str, seconds: float, predicted: float, status: str = "ran", fitting: bool = True, **keys) -> Case:
    row = {**ROW, "source": source, "gpus": keys.get("gpus", "8"), "zero": str(keys.get("zero", 1))}
    row |= {"status": status, "oom_evidence": "states" if status == "oom" else ""}
    ran = seconds if status == "ran" else None
    intervals = {"seconds_interval": (0.9 * predicted, 1.1 * predicted), "memory_interval": (30, 50)}
    return Case(row, source, True, ran, keys.get("held"), ran, predicted, 40, fitting, total_memory_gib=41, **intervals)


CASES = [
    case("a", 10, 12, held=50), case("a", 10, 8), case("a", 10, 11), case("a", 5, 9), case("b", 10, 10.5, held=80),
    case("b", 10, 15, "oom", True), case("b", 10, 15, "oom", False), case("b", 20, 7, "ran", False),
]  # fmt: skip


def test_errors_by_source():
    """Of a: 20, 20, 10 and 80 %, the median of which is 20; of b 5 and 65 %, the median 35."""
    assert figures.middle(figures.times(CASES[:4])) == pytest.approx(0.2)
    assert figures.high(figures.times(CASES[:4])) == pytest.approx(0.8)
    assert figures.medians(CASES, figures.times, figures.source) == pytest.approx({"a": 0.2, "b": 0.35})
    assert figures.medians(CASES, figures.memories, figures.source) == pytest.approx({"a": 0.2, "b": 0.5})


def test_errors_by_number_of_gpus():
    """Of 8 GPUs 10 and 20 %, of 16 40 %, of 2,048 30 %."""
    sizes = ((8, 11), (8, 12), (16, 6), (2048, 13))
    found = [case("a", 10, seconds, gpus=str(gpus)) for gpus, seconds in sizes]
    medians = figures.medians(found, figures.times, figures.band)
    expected = {"1 to 8 GPUs": 0.15, "9 to 32 GPUs": 0.4, "513 GPUs and more": 0.3}
    assert medians == pytest.approx(expected)


def test_the_figures_of_the_goals():
    """Worst and mean of the sources; a run out of memory is judged by the bound of its kind, none for `states`."""
    found = {each.name: each for each in figures.headline(CASES)}
    expected = {
        "step time, median error": (20, 15, 10),
        "step time, 90 % quantile of the errors": (80, 45, 30),
        "step time, mean of the sources' medians": (27.5, 20, 12),
        "step time, worst source (b)": (35, 30, 20),
        "step time, worst number of GPUs (1 to 8 GPUs)": (20, 25, 15),
        "peak memory, mean of the sources' medians": (35, 12, 7),
        "peak memory, worst source (b)": (50, 20, 12),
        "out of memory (states), predicted to fit": (50, 0, 0),
        "runs that ran, predicted not to fit": (100 / 6, 3, 1),
        "regret of the first choice, worst cell": (50, 60, 25),
    }
    shown = {name: (found[name].value, found[name].bound[1], found[name].aim[1]) for name in expected}
    assert {name: pytest.approx(values) for name, values in expected.items()} == shown
    assert found["step time, worst number of GPUs (1 to 8 GPUs)"].verdict == "bound kept"
    assert found["out of memory (states), predicted to fit"].verdict == "missed"


def test_what_is_predicted_to_fit():
    assert figures.missed(CASES) == {"states": [True, False]}
    assert figures.flagged(CASES) == [False] * 5 + [True]


def test_coverage():
    """Intervals of 10 %: 10 is in 9.9 to 12.1 (11) and in 9.45 to 11.55 (10.5); 50 GiB is the end of an interval."""
    assert figures.coverage(CASES) == (pytest.approx(2 / 6), 0.5)


def test_regret_of_the_first_choice():
    """The fastest prediction of a takes 10 s, the best run 5; in b, fewer than three ran."""
    for choose in (cells.answered, cells.fastest):
        assert cells.regrets(CASES, choose) == {"a, M, 8, H100, 4096, 256": 0.5}
    tempting = case("a", 1, 3, "oom")
    assert list(cells.regrets([*CASES, tempting], cells.fastest).values()) == [cells.MOST]


def test_the_first_choice_is_what_plan_answers():
    """ZeRO-1 comes before FSDP, which is predicted to be 5 % faster: a tie. 30 % are none."""
    simple, near, far = case("a", 10, 10, zero=1), case("a", 8, 9.5, zero=3), case("a", 5, 7, zero=3)
    other = case("a", 20, 20)
    assert cells.answered([simple, near, other]) is simple and cells.fastest([simple, near, other]) is near
    assert list(cells.regrets([simple, near, other], cells.answered).values()) == [pytest.approx(0.2)]
    assert cells.answered([simple, far, other]) is far


def test_which_of_two_is_faster():
    """Of 3 pairs with predictions 3 % and 50 % apart, one is in the wrong order."""
    found = cells.order([case("a", 10, 10), case("a", 11, 10.3), case("a", 9, 15)])
    assert [(low, pairs, right) for low, _, pairs, right in found] == [(0.02, 1, 1)]
    found = cells.order([case("a", 10, 10), case("a", 9, 10.3), case("a", 12, 11.5)])
    assert [(low, pairs, right) for low, _, pairs, right in found] == [(0.02, 1, 0), (0.08, 1, 1), (0.12, 1, 1)]


def test_disorder():
    """In the same order 0, in reverse 2; of 1 2 3 4 against 2 1 3 4, 6 x 2 / (4 x 15) = 0.2; equal ones share ranks."""
    pairs = {"a": [(1, 1), (2, 5), (3, 9)], "b": [(1, 9), (2, 5), (3, 1)], "c": [(2, 1), (1, 2), (3, 3), (4, 4)]}
    found = [case(name, measured, predicted) for name, each in pairs.items() for measured, predicted in each]
    same, reverse, swapped = cells.disorder(found).values()
    assert (same, reverse, swapped) == (pytest.approx(0), pytest.approx(2), pytest.approx(0.2))
    ties = [case("d", measured, predicted) for measured, predicted in ((1, 1), (1, 2), (2, 3))]
    assert [*cells.disorder(ties).values()] == [pytest.approx(1 - 1.5 / 3**0.5)]


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
    job = a_job(strategy=strategy(1), stack="nanotron")
    seconds = step_time.breakdown(job, Profile()).total

    def runs(factor: float) -> list[Measured]:
        return [Measured(job, "a", seconds, None), Measured(job, "b", factor * seconds, None)]

    plain, slow = (fits.constants_without(runs(factor)) for factor in (1, 1.3))
    assert slow["b"] == plain["b"] and slow["a"] != plain["a"]
