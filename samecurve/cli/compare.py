"""Run the same short training under each strategy, one after another on this machine, and compare the loss curves.

The exit code is 0 if every strategy that can run here agrees with the reference, else 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from samecurve.bench import jobs
from samecurve.bench.jobs import Outcome
from samecurve.cli.commands import require_positive
from samecurve.config import loader as recipes
from samecurve.reports.chart import Curve, chart, relative_difference
from samecurve.run.run_directory import iterate_metrics, last_step
from samecurve.storage.atomic import storage_errors, write_text
from samecurve.storage.terminal import TextConsole

COLUMNS = "strategy", "engine", "world", "loss", "max loss difference", "max norm difference", "tokens/s", "memory GiB"
# The norm is the square root of a sum over all gradients, each with its own rounding.
NORM_TOLERANCE_FACTOR = 10
# Tolerances of the loss. Strategies round to 16 bits at different places. Each stays within 5e-3 (bf16) or 1e-3 (fp16)
# of the curve in fp32 (test_equal_curves.py and test_fp16.py in tests/distributed), so any two within twice that.
LEAST_NORM = 1e-6  # a model whose gradient norms all lie below is dead: usual norms are 1e-2 to 1e2
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/quickstart.yaml")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values for every strategy"
    )
    parser.add_argument(
        "--strategies",
        default="",
        metavar="a,b,c",
        help="names in configs/, or files; the first is the reference (default: all of configs/)",
    )
    parser.add_argument(
        "--num_processes", type=int, metavar="N", help="processes per run (default: the number of GPUs, or 2 without)"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each run (default: %(default)s)")
    usual = "default: " + ", ".join(f"{value:g} in {precision}" for precision, value in TOLERANCES.items())
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help=f"largest relative difference of the loss at any step ({usual})",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for runs, table and chart (default: runs/compare/RECIPE)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if every strategy that can run here agrees with the reference, else 1."""
    require_positive(arguments, "num_processes")
    names = [name for name in arguments.strategies.split(",") if name]
    output = arguments.output or Path("runs/compare") / Path(arguments.recipe).stem
    outcomes, precision = run_each(
        arguments.recipe, arguments.overrides, names, arguments.num_processes, arguments.steps, output
    )
    tolerance = TOLERANCES[precision] if arguments.tolerance is None else arguments.tolerance
    text, agree = verdict(outcomes, tolerance, precision)
    # A strategy requested by name must run. Without names, some strategies may be unsuitable for this machine.
    agree = agree and not (names and any(outcome.refused for outcome in outcomes))
    title = Path(arguments.recipe).stem
    ran = [outcome for outcome in outcomes if not outcome.reason]
    curves = [Curve(outcome.job.name, largest_differences(outcome, ran[0])[0]) for outcome in ran]
    with storage_errors(output):
        write_text(output / "table.md", text)
        (output / "chart.svg").unlink(missing_ok=True)
        if curves:
            write_text(output / "chart.svg", chart(ran[0].history.curves["loss"], curves, title, tolerance))
    print(f"\n{text}\n{output / 'table.md'}  {output / 'chart.svg' if curves else ''}")
    return 0 if agree else 1


def run_each(
    recipe: str, overrides: Sequence[str], names: Sequence[str], num_processes: int | None, steps: int, output: Path
) -> tuple[list[Outcome], str]:
    """Run a short training of `steps` steps under each strategy, one after another.

    Args:
        overrides: recipe values for every strategy. In fp32 unless they or the recipe demand another precision.
        names: strategies in configs/, the first is the reference; empty for all.
        num_processes: per run; None for the number of GPUs, or 2 without.
        output: folder of the runs.

    Returns:
        (an outcome per strategy, the precision).
    """
    # Strategies agree up to rounding in fp32, which some recipes do not allow (adamw_bf16, fp8).
    problems = recipes.read_recipe(recipe, [*overrides, "precision=fp32"]).document.problems
    settings = jobs.shortened(recipe, overrides, steps, **({} if problems else {"precision": "fp32"}))
    chosen = jobs.jobs(names, num_processes or jobs.default_processes())
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    console = TextConsole()
    outcomes = []
    for index, job in enumerate(chosen, 1):
        label = f"[{index}/{len(chosen)}] {job.name}, {job.world_size} process{'es' if job.world_size > 1 else ''}"
        directory = output / job.name
        arguments = jobs.command(job, recipe, settings, directory)
        with console.status(label) as status:
            outcome = jobs.run(
                job,
                arguments,
                directory,
                lambda steps, label=label, status=status: status.update(f"{label}: {steps} steps"),
            )
        outcomes.append(outcome)
        console.print(f"{label}: {outcome.reason or f'{last_step(outcome.directory)} steps'}")
    return outcomes, recipes.load_recipe(recipe, settings).precision


def is_same(loss: float, norm: float, tolerance: float) -> bool:
    """Whether largest relative differences of loss and gradient norm are those of one curve."""
    return loss <= tolerance and norm <= NORM_TOLERANCE_FACTOR * tolerance


def verdict(outcomes: Sequence[Outcome], tolerance: float, precision: str = "fp32") -> tuple[str, bool]:
    """Compare the outcomes with the first strategy that ran, the reference.

    Returns:
        (the table as Markdown, whether all strategies that ran agree and at least one beside the reference ran).
    """
    ran = [outcome for outcome in outcomes if not outcome.reason]
    broken = any(outcome.reason and not outcome.refused for outcome in outcomes)
    stands_still = why_nothing_moves(ran[0], tolerance) if ran else ""
    rows, agree = [], not broken and len(ran) >= min(2, len(outcomes))
    for outcome in ran:
        loss, norm = largest_differences(outcome, ran[0])
        same = is_same(loss, norm, tolerance) and not stands_still
        agree = agree and same
        # with a value missing, the reference does not even agree with itself
        shown = ["reference"] * 2 if outcome is ran[0] and same else [f"{loss:.1e}", f"{norm:.1e}"]
        history = outcome.history
        ends = [record.get("loss") for record in (next(iter(history.records)), history.last)]
        curve = " -> ".join("none" if value is None else f"{value:.4f}" for value in ends)
        # without the first step, which includes start-up costs
        read = "tokens" if outcome.run.get("counts", "tokens") == "tokens" else "input_tokens"
        first = {key: history.ends[key][0] if history.num_steps > 1 else 0 for key in (read, "step_seconds")}
        tokens, seconds = (history.totals[key] - value for key, value in first.items())
        memory = max(value for _, value in history.curves["peak_memory_gib"] if value is not None)  # of rank 0
        facts = [outcome.job.name, outcome.run["engine"], str(outcome.run["world_size"]), curve]
        rows.append([*facts, *shown, f"{tokens / seconds:,.0f}", f"{memory:.2f}", "PASS" if same else "FAIL"])
    limits = f"PASS: loss within {tolerance:g} and gradient norm within {NORM_TOLERANCE_FACTOR * tolerance:g} of "
    computed = "" if precision == "fp32" else f", in {precision}"
    parts = []
    if ran:
        # columns are aligned to be readable as source, too
        cells = [[*COLUMNS, ""], *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in cells]
        lines = [f"| {' | '.join(row)} |\n" for row in padded]
        rule = "|".join("-" * (width + 2) for width in widths)
        parts += [lines[0], f"|{rule}|\n", *lines[1:]]
        parts.append(f"\n{limits}{ran[0].job.name}'s, relative, at every step{computed}.\n")
    if stands_still:
        text = "A strategy that trains nothing would give the same curve."
        parts.append(f"\nFAIL: {ran[0].job.name} {stands_still}.\n{text}\n")
    parts += [
        f"- {outcome.job.name}: {'cannot run here' if outcome.refused else 'FAIL'}: {outcome.reason}\n"
        for outcome in outcomes
        if outcome.reason
    ]
    return "".join(parts), agree


def why_nothing_moves(outcome: Outcome, tolerance: float) -> str:
    """Return why a run cannot show that strategies agree: any strategy follows a curve that stands still. "" if it can.

    Args:
        outcome: of the reference.
        tolerance: of the loss; a curve that changes by less could not be told from a flat one.
    """
    history = outcome.history
    if not {"loss", "grad_norm"} <= history.ends.keys():
        return ""  # largest_differences reports missing values
    losses, norms = ([value for _, value in history.curves[key] if value is not None] for key in ("loss", "grad_norm"))
    norm, change = max(norms), (max(losses) - min(losses)) / (max(map(abs, losses)) or 1)
    if not history.totals.get("learning_rate") or history.last.get("skipped_steps") == history.num_steps:
        return "changed no weight: each step was skipped or had the learning rate 0"
    if norm < LEAST_NORM:
        return f"has gradient norms of at most {norm:.1e}, below {LEAST_NORM:g}; its initial weights may be too small"
    if change <= tolerance:
        fix = "more steps (--steps) or a higher optimizer.learning_rate make it change"
        return f"has a loss that changes by {change:.1e}, relative, within the tolerance of {tolerance:g}; {fix}"
    return ""


def largest_differences(outcome: Outcome, reference: Outcome) -> tuple[float, float]:
    """Return the largest relative differences of loss and gradient norm over the steps.

    They are infinite if a step or a value is missing or is 0 / 0. The norm is that of steps which are not skipped by
    both: gradients beyond the range of fp16 have none.
    """
    largest = {"loss": -1.0, "grad_norm": -1.0}
    for records in zip_longest(*(iterate_metrics(side.directory) for side in (outcome, reference))):
        ours, theirs = (record or {} for record in records)
        skips = ours.get("skipped_steps") and ours["skipped_steps"] == theirs.get("skipped_steps")
        for key in largest:
            values = ours.get(key), theirs.get(key)
            if key == "grad_norm" and skips and values == (None, None):
                continue
            difference = relative_difference(*values)
            largest[key] = math.inf if difference is None else max(largest[key], difference)
    loss, norm = (value if value >= 0 else math.inf for value in largest.values())
    return loss, norm
