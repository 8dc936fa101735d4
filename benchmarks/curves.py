"""Comparisons of scripts/compare_recipes.py: each recipe, as far as a small machine can train it, and its outcome."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from benchmarks.machine import commit
from benchmarks.markdown import table
from samecurve.bench.jobs import Outcome
from samecurve.cli.compare import (
    NORM_TOLERANCE_FACTOR,
    TOLERANCES,
    is_same,
    largest_differences,
    run_each,
    verdict,
    why_nothing_moves,
)
from samecurve.config.loader import load_recipe
from samecurve.specs.environment import processor, version

ROOT = Path(__file__).resolve().parents[1]
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
        "commit": commit(*(str(path.relative_to(ROOT)) for path in (RESULTS, PAGE, STRATEGIES))),
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


START, END = "<!-- overview: scripts/compare_recipes.py -->", "<!-- end of the overview -->"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")


def page(results: dict[str, dict]) -> str:
    recipes = sorted(results)
    strategies = sorted({name for each in results.values() for name in each["strategies"]})
    reasons: dict[str, int] = {}
    rows = []
    for strategy in strategies:
        found = [results[recipe]["strategies"].get(strategy, {}) for recipe in recipes]
        rows.append([f"`{strategy}`", worlds(found), *(shown(each, reasons) for each in found), largest_norm(found)])
    tolerance = TOLERANCES["fp32"]
    missing = [name for name in recipe_names() if name not in results]
    verdicts = ("PASS" if results[recipe]["agree"] else "FAIL" for recipe in recipes)
    parts = [
        "# Every recipe under every strategy",
        "Made by `python scripts/compare_recipes.py`: each column is one `python -m samecurve compare` with "
        f"{PROCESSES} processes, or as many as the strategy needs. A number is the largest relative difference of the "
        "loss from that of `single`, one process, over all steps; a number in brackets names the reason why the "
        f"strategy refuses the recipe. `PASS`: at every step the loss is within {tolerance:g} and the gradient norm "
        f"within {NORM_TOLERANCE_FACTOR * tolerance:g} in fp32, under each strategy that takes the recipe.",
        table(
            ["strategy", "processes", *(f"`{recipe}`" for recipe in recipes), "largest norm"],
            [*rows, ["", "", *verdicts, ""]],
        ),
        "\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
        "Not measured yet: " + ", ".join(f"`{name}`" for name in missing) + "." if missing else "",
        "## How",
        table(["recipe", "steps", "precision", "not as shipped", "date", "commit"], list(conditions(results))),
        "Dropout, packing, accumulation and the order of rows are the recipes' own. Measured on "
        f"{os.cpu_count()} cores ({processor()}), no GPU, gloo; "
        f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def overview(results: dict[str, dict]) -> str:
    """Write who trains what for docs/strategies.md: yes, or the number of the reason on the page."""
    recipes, reasons = sorted(results), {}
    strategies = sorted({name for each in results.values() for name in each["strategies"]})
    rows = []
    for strategy in strategies:
        cells = [shown(results[recipe]["strategies"].get(strategy, {}), reasons) for recipe in recipes]
        # a number in brackets is a reason, FAIL and an empty cell are neither
        rows.append([f"`{strategy}`", *("yes" if cell[:1].isdigit() else cell for cell in cells)])
    return table(["strategy", *(f"`{recipe}`" for recipe in recipes)], rows)


def with_overview(text: str, results: dict[str, dict]) -> str:
    """Replace the overview in a page, between its two marks."""
    before, after = text.split(START)[0], text.split(END)[1]
    return f"{before}{START}\n\n{overview(results)}\n\n{END}{after}"


def worlds(found: list[dict]) -> str:
    return ", ".join(map(str, sorted({each["world"] for each in found if "world" in each})))


def largest_norm(found: list[dict]) -> str:
    norms = [each["norm"] for each in found if each.get("norm") is not None]
    return f"{max(norms):.0e}" if norms else ""


def shown(found: dict, reasons: dict[str, int]) -> str:
    if reason := found.get("refused"):
        return f"({reasons.setdefault(without_place(reason), len(reasons) + 1)})"
    if "failed" in found:
        return "FAIL"
    if "loss" not in found:
        return ""
    return "missing" if found["loss"] is None else f"{found['loss']:.0e}"


def without_place(reason: str) -> str:
    """Cut what differs from recipe to recipe: file and line, what was found, how many more reasons there are."""
    reason = re.sub(r" \(and \d+ more, see .*?\)", "", reason)
    return re.sub(r"^[\w/.]+?(:\d+)?: ", "", re.sub(r"found \w+, but ", "", reason))


def conditions(results: dict[str, dict]) -> Iterator[list[str]]:
    for name, result in sorted(results.items()):
        changed = " ".join(f"`{each}`" for each in result["overrides"])
        later = {tuple(when) for when in result.get("measured_later", {}).values()}
        dates, commits = zip((result["date"], result["commit"] or ""), *sorted(later), strict=True)
        when = ", ".join(dict.fromkeys(dates)), ", ".join(dict.fromkeys(filter(None, commits)))
        yield [f"`{name}`", str(result["steps"]), result["precision"], changed, *when]
