"""Comparisons of scripts/compare_recipes.py: each recipe, as far as a small machine can train it, and its outcome."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import date
from pathlib import Path

from benchmarks.machine import commit
from samecurve.bench.jobs import Outcome
from samecurve.cli.compare import TOLERANCES, is_same, largest_differences, run_each, verdict, why_nothing_moves
from samecurve.config.loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = ROOT / "docs" / "strategies.md"
RESULTS = ROOT / "benchmarks" / "curves.json"
PAGE = ROOT / "docs" / "equal_curves.md"
WORK = Path("runs/compare")
PRETRAINED = WORK / "pretrained"
PROCESSES = 2
# What two cores cannot compute in minutes; all else is as shipped.
SMALL_MODEL = tuple(
    f"model.config.{key}={value}"
    for key, value in {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }.items()
)
SHORT_ROWS = "batch.sequence_length=256"
SMALLER = {"pretrain": (*SMALL_MODEL, "tokenizer.vocabulary_size=4096", SHORT_ROWS, "data.path=builtin:python-stdlib")}


def recipe_names() -> list[str]:
    """All recipes but those that others start from."""
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in ("base", "tiny"))


def measure(name: str, steps: int, strategies: list[str]) -> dict:
    """Compare the strategies ([]: all) with `single`, as `python -m samecurve compare` does."""
    recipe = f"recipes/{name}.yaml"
    overrides = overrides_of(name)
    outcomes, precision = run_each(
        recipe, overrides, ["single", *strategies] if strategies else [], PROCESSES, steps, WORK / name
    )
    _, agree = verdict(outcomes, TOLERANCES[precision], precision)
    return {
        "overrides": list(overrides),
        "steps": steps,
        "precision": precision,
        "agree": agree,
        "date": str(date.today()),
        "commit": commit(str(RESULTS.relative_to(ROOT)), str(PAGE.relative_to(ROOT))),
        "strategies": {outcome.job.name: cell(outcome, outcomes[0], TOLERANCES[precision]) for outcome in outcomes},
    }


def merged(before: dict, found: dict) -> dict:
    """Replace some strategies of a recipe, and note when they were measured."""
    when = {name: [found["date"], found["commit"]] for name in found["strategies"] if name != "single"}
    together, tolerance = before["strategies"] | found["strategies"], TOLERANCES[before["precision"]]
    return before | {
        "agree": all(agrees(each, tolerance) for each in together.values()),
        "strategies": together,
        "measured_later": before.get("measured_later", {}) | when,
    }


def agrees(found: dict, tolerance: float) -> bool:
    """Whether a strategy is near enough; one that refuses the recipe is."""
    complete = found.get("loss") is not None and found.get("norm") is not None
    return "refused" in found or (complete and is_same(found["loss"], found["norm"], tolerance))


def cell(outcome: Outcome, reference: Outcome, tolerance: float) -> dict:
    if outcome.reason:
        return {"refused" if outcome.refused else "failed": outcome.reason}
    if reason := why_nothing_moves(reference, tolerance):
        return {"failed": f"{reference.job.name} {reason}"}
    loss, norm = largest_differences(outcome, reference)
    return {"loss": finite(loss), "norm": finite(norm), "world": outcome.run["world_size"]}


def finite(value: float) -> float | None:
    """None where a step is missing: JSON has no infinity."""
    return value if math.isfinite(value) else None


def overrides_of(name: str) -> tuple[str, ...]:
    """What is not as shipped: the size of a model that is made, and the weights of one that would come from a hub."""
    smaller = SMALLER.get(name, ())
    if load_recipe(f"recipes/{name}.yaml", smaller).model.path is None:
        return smaller
    teacher = (f"distill.teacher={pretrained()}",) if name == "distill" else ()
    return (f"model.path={pretrained()}", *teacher, SHORT_ROWS)


def pretrained() -> Path:
    """A small Llama with a chat template, made once.

    After 20 steps instead of 100, one process with another micro-batch size differed by 1.4e-5 in the gradient norm.
    """
    if not (PRETRAINED / "model").exists():
        overrides = "steps=100", "evaluate.every_steps=0", f"output_dir={PRETRAINED}"
        subprocess.run([sys.executable, "train.py", "recipes/sft.yaml", *overrides], check=True)
    return PRETRAINED / "model"
