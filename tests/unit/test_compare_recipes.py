"""scripts/compare_recipes.py: a row per recipe, a number or a reason per strategy, and what is not as shipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.curves import (
    PAGE,
    RESULTS,
    STRATEGIES,
    cell,
    conditions,
    merged,
    overrides_of,
    overview,
    page,
    recipe_names,
    with_overview,
)
from samecurve.bench.jobs import Outcome, StrategyJob


def test_cells(tmp_path):
    def outcome(name: str, losses: list[float], reason: str = "", refused: bool = False) -> Outcome:
        folder = tmp_path / f"{name} {losses}"
        folder.mkdir(exist_ok=True)
        lines = [
            {"step": step, "loss": loss, "grad_norm": 2 * loss, "learning_rate": 1e-3, "skipped_steps": 0}
            for step, loss in enumerate(losses, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return Outcome(StrategyJob(name, None, 2), {"world_size": 2}, folder, reason, refused, Path("log"))

    reference = outcome("single", [4.0, 2.0])
    assert cell(reference, reference, 1e-5) == {"loss": 0.0, "norm": 0.0, "world": 2}
    assert cell(outcome("ddp", [4.0, 2.0 + 2e-6]), reference, 1e-5)["loss"] == pytest.approx(1e-6, rel=1e-3)
    assert cell(outcome("ddp", [4.0]), reference, 1e-5)["loss"] is None  # a step is missing
    assert cell(outcome("tp", [], "no dropout", refused=True), reference, 1e-5) == {"refused": "no dropout"}
    assert cell(outcome("tp", [], "died"), reference, 1e-5) == {"failed": "died"}
    flat = outcome("single", [4.0, 4.0])
    assert cell(outcome("ddp", [4.0, 4.0]), flat, 1e-5)["failed"].startswith("single has a loss that changes by 0.0")


def test_page():
    """A row per strategy, a column per recipe. Equal reasons have one number, in the order in which they come."""
    about = {"steps": 8, "precision": "fp32", "date": "2026-01-02", "commit": "c0ffee"}
    reference = {"loss": 0.0, "norm": 0.0, "world": 1}
    refused = {"refused": "recipes/a.yaml:9: task: found a, but dropout (and 2 more, see runs/tp.log)"}
    good = {"single": reference, "tp": refused, "ddp": {"loss": 2e-7, "norm": 3e-6, "world": 2}}
    bad = {
        "single": reference,
        "tp": {"refused": "recipes/b.yaml:7: task: found b, but dropout"},
        "ddp": {"failed": "died"},
    }
    text = page(
        {
            "b": {**about, "agree": False, "overrides": ["steps=3"], "strategies": bad},
            "a": {**about, "agree": True, "overrides": [], "strategies": good},
        }
    )
    assert "| strategy | processes | `a` | `b` | largest norm |" in text
    assert "| `ddp` | 2 | 2e-07 | FAIL | 3e-06 |" in text and "|  |  | PASS | FAIL |  |" in text
    assert "| `tp` |  | (1) | (1) |  |" in text and text.count("1. task: dropout") == 1
    assert "| `b` | 8 | fp32 | `steps=3` | 2026-01-02 | c0ffee |" in text


def test_what_is_not_as_shipped(monkeypatch):
    monkeypatch.setattr("benchmarks.curves.pretrained", lambda: Path("small"))
    assert overrides_of("classify") == ()
    assert overrides_of("lora") == ("model.path=small", "batch.sequence_length=256")
    assert overrides_of("distill")[1] == "distill.teacher=small"
    assert "data.path=builtin:python-stdlib" in overrides_of("pretrain")


def test_strategies_that_are_measured_later():
    about = {"steps": 8, "precision": "fp32", "overrides": [], "agree": True}
    exact, good = {"loss": 0.0, "norm": 0.0}, {"loss": 1e-7, "norm": 1e-6}
    before = {**about, "date": "2026-01-02", "commit": "c0ffee", "strategies": {"single": exact, "ddp": good}}
    found = {
        **about,
        "date": "2026-01-03",
        "commit": "beef",
        "strategies": {"single": exact, "tp": {"refused": "no plan"}},
    }
    both = merged(before, found)
    assert both["strategies"] == {"single": exact, "ddp": good, "tp": {"refused": "no plan"}} and both["agree"]
    assert next(conditions({"a": both}))[-2:] == ["2026-01-02, 2026-01-03", "c0ffee, beef"]
    worse = merged(both, {**found, "strategies": {"tp": {"loss": 1e-4, "norm": 1e-4}}})
    assert not worse["agree"] and merged(worse, found)["agree"]


def test_the_pages_are_the_stored_results():
    """docs/equal_curves.md is but for the machine that wrote it; no cell is empty and none has failed."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = STRATEGIES.read_text(encoding="utf-8")
    assert with_overview(text, results) == text
    cells = [cell for line in overview(results).splitlines()[2:] for cell in line.strip("| ").split(" | ")[1:]]
    strategies = {path.stem for path in (STRATEGIES.parents[1] / "configs").glob("*.yaml")}
    assert len(cells) == len(recipe_names()) * len(strategies)
    assert all(re.fullmatch(r"yes|\(\d+\)", cell) for cell in cells)
    assert all(each["agree"] for each in results.values())
    written = PAGE.read_text(encoding="utf-8")
    assert page(results).split("Measured on")[0] == written.split("Measured on")[0]
