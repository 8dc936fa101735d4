"""Write docs/equal_curves.md: every recipe under every strategy, each against one process.

    python scripts/compare_recipes.py [--recipes sft,dpo] [--steps 8] [--output FILE]

One `python -m samecurve compare` per recipe. Its result is kept in benchmarks/curves.json as soon as it is there, so
that the table can be made in pieces, and the page is written from that file. No hub is reached: a recipe that starts
from weights of the hub starts from the small model that recipes/sft.yaml makes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
from samecurve.cli.compare import NORM_TOLERANCE_FACTOR, TOLERANCES, largest_difference, run_each, verdict  # noqa: E402
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
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    known = sorted(path.stem for path in Path("recipes").glob("*.yaml") if path.stem not in ("base", "tiny"))
    chosen = [name for name in arguments.recipes.split(",") if name] or known
    if unknown := set(chosen) - set(known):
        parser.error(f"--recipes: no recipes/{min(unknown)}.yaml; the names are {', '.join(known)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in chosen:
        print(f"\n{name}", flush=True)
        results[name] = measure(name, arguments.steps)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        arguments.output.write_text(page(results), encoding="utf-8")
    print(arguments.output)


def measure(name: str, steps: int) -> dict:
    """Compare the strategies with `single`, as `python -m samecurve compare` does."""
    recipe = f"recipes/{name}.yaml"
    overrides = overrides_of(name)
    outcomes, precision = run_each(recipe, overrides, (), PROCESSES, steps, WORK / name)
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
    """A small Llama with a chat template, made once."""
    if not (PRETRAINED / "model").exists():
        command = [sys.executable, "train.py", "recipes/sft.yaml", "steps=20", "schedule.warmup_steps=5", f"output_dir={PRETRAINED}"]
        subprocess.run([*command, "evaluate.every_steps=0"], check=True)
    return PRETRAINED / "model"


def page(results: dict[str, dict]) -> str:
    strategies = list(dict.fromkeys(name for each in results.values() for name in each["strategies"]))
    reasons: dict[str, int] = {}
    rows = []
    for name, result in sorted(results.items()):
        cells = [shown(result["strategies"].get(strategy), reasons) for strategy in strategies]
        rows.append([f"`{name}`", *cells, "PASS" if result["agree"] else "FAIL"])
    tolerance = TOLERANCES["fp32"]
    parts = [
        "# Every recipe under every strategy",
        f"Made by `python scripts/compare_recipes.py`: each row is one `python -m samecurve compare` with "
        f"{PROCESSES} processes (`hsdp` and `fsdp_tp` have 4). A number is the largest relative difference of the loss "
        "from that of `single`, one process, over all steps; the gradient norm's is behind it. `PASS`: at every step "
        f"the loss is within {tolerance:g} and the norm within {NORM_TOLERANCE_FACTOR * tolerance:g}, in fp32, under "
        "each strategy that takes the recipe. A number in brackets names why a strategy refuses it.",
        table(["recipe", *(f"`{name}`" for name in strategies), ""], rows),
        "\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
        "## How",
        table(["recipe", "steps", "precision", "not as shipped", "date", "commit"], list(conditions(results))),
        "Dropout, packing, accumulation and the order of rows are the recipes' own. Measured on "
        f"{os.cpu_count()} cores ({processor()}), no GPU, gloo; "
        f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(found: dict | None, reasons: dict[str, int]) -> str:
    if found is None:
        return ""
    if reason := found.get("refused"):
        return f"({reasons.setdefault(reason, len(reasons) + 1)})"
    if "failed" in found:
        return "FAIL"
    return " ".join("missing" if found[key] is None else f"{found[key]:.0e}" for key in ("loss", "norm"))


def conditions(results: dict[str, dict]) -> Iterator[list[str]]:
    for name, result in sorted(results.items()):
        changed = " ".join(f"`{each}`" for each in result["overrides"])
        yield [f"`{name}`", str(result["steps"]), result["precision"], changed, result["date"], result["commit"] or ""]


if __name__ == "__main__":
    main()
