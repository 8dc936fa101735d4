"""The results of scripts/compare_recipes.py as a page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from benchmarks.curves.runs import PROCESSES, recipe_names
from benchmarks.markdown import table
from samecurve.cli.compare import NORM_TOLERANCE_FACTOR, TOLERANCES
from samecurve.specs.environment import processor, version

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
