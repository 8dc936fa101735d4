"""scripts/compare_recipes.py: a row per recipe, a number or a reason per strategy, and what is not as shipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_recipes", ROOT / "scripts" / "compare_recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(name: str, losses: list[float], reason: str = "", refused: bool = False) -> SimpleNamespace:
    metrics = [{"loss": loss, "grad_norm": 2 * loss} for loss in losses]
    return SimpleNamespace(
        job=SimpleNamespace(name=name), metrics=metrics, run={"world_size": 2}, reason=reason, refused=refused
    )


def test_cells(script):
    reference = outcome("single", [4.0, 2.0])
    assert script.cell(reference, reference) == {"loss": 0.0, "norm": 0.0, "world": 2}
    assert script.cell(outcome("ddp", [4.0, 2.0 + 2e-6]), reference)["loss"] == pytest.approx(1e-6, rel=1e-3)
    assert script.cell(outcome("ddp", [4.0]), reference)["loss"] is None  # a step is missing
    assert script.cell(outcome("tp", [], "no dropout", refused=True), reference) == {"refused": "no dropout"}
    assert script.cell(outcome("tp", [], "died"), reference) == {"failed": "died"}


def test_page(script):
    """Equal reasons have one number, in the order in which they come."""
    about = {"steps": 8, "precision": "fp32", "date": "2026-01-02", "commit": "c0ffee"}
    good = {"single": {"loss": 0.0, "norm": 0.0}, "tp": {"refused": "dropout"}, "ddp": {"loss": 2e-7, "norm": 3e-6}}
    bad = {"single": {"loss": 0.0, "norm": 0.0}, "tp": {"refused": "dropout"}, "ddp": {"failed": "died"}}
    page = script.page(
        {
            "b": {**about, "agree": False, "overrides": ["steps=3"], "strategies": bad},
            "a": {**about, "agree": True, "overrides": [], "strategies": good},
        }
    )
    assert "| `a` | 0e+00 0e+00 | (1) | 2e-07 3e-06 | PASS |" in page
    assert "| `b` | 0e+00 0e+00 | (1) | FAIL | FAIL |" in page
    assert page.count("1. dropout") == 1 and "| `b` | 8 | fp32 | `steps=3` | 2026-01-02 | c0ffee |" in page


def test_what_is_not_as_shipped(script, monkeypatch):
    monkeypatch.setattr(script, "pretrained", lambda: Path("small"))
    assert script.overrides_of("classify") == ()
    assert script.overrides_of("lora") == ("model.path=small", "batch.sequence_length=256")
    assert script.overrides_of("distill")[1] == "distill.teacher=small"
    assert "data.path=builtin:python-stdlib" in script.overrides_of("pretrain")
