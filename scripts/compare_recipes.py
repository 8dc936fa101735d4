"""Write docs/equal_curves.md: every recipe under every strategy, each against one process.

    python scripts/compare_recipes.py [--recipes sft,dpo] [--strategies tp,zero3] [--steps 8] [--output FILE]

One `python -m samecurve compare` per recipe. Its result is kept in benchmarks/curves.json as soon as it is there, so
that the table can be made in pieces, a recipe or some of its strategies, and the page is written from that file. No hub
is reached: a recipe that starts from weights of the hub starts from the small model that recipes/sft.yaml makes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit  # noqa: E402
from benchmarks.markdown import table  # noqa: E402
from samecurve.bench.jobs import Outcome  # noqa: E402
from samecurve.cli.compare import (  # noqa: E402
    NORM_TOLERANCE_FACTOR,
    TOLERANCES,
    is_same,
    largest_difference,
    run_each,
    verdict,
)
from samecurve.config.loader import load_recipe  # noqa: E402
from samecurve.specs.environment import processor, version  # noqa: E402

RESULTS = ROOT / "benchmarks" / "curves.json"
PAGE = ROOT / "docs" / "equal_curves.md"
WORK = Path("runs/compare")
PRETRAINED = WORK / "pretrained"
PROCESSES = 2
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="", help="names in recipes/, with commas between (default: all)")
    parser.add_argument("--strategies", default="", help="names in configs/; the others' results stay (default: all)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    known = recipe_names()
    chosen = [name for name in arguments.recipes.split(",") if name] or known
    if unknown := set(chosen) - set(known):
        parser.error(f"--recipes: no recipes/{min(unknown)}.yaml; the names are {', '.join(known)}")
    strategies = [name for name in arguments.strategies.split(",") if name]
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in chosen:
        print(f"\n{name}", flush=True)
        before = results.get(name) if strategies else None
        found = measure(name, before["steps"] if before else arguments.steps, strategies)
        results[name] = merged(before, found) if before else found
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        arguments.output.write_text(page(results), encoding="utf-8")
    print(arguments.output)


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
        "strategies": {outcome.job.name: cell(outcome, outcomes[0]) for outcome in outcomes},
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


def cell(outcome: Outcome, reference: Outcome) -> dict:
    if outcome.reason:
        return {"refused" if outcome.refused else "failed": outcome.reason}
    loss, norm = (largest_difference(outcome, reference, key) for key in ("loss", "grad_norm"))
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


if __name__ == "__main__":
    main()
