"""Predict memory and step time of a job under each strategy, without a GPU and without weights.

MODEL_OR_RECIPE is a recipe, or a Hugging Face config.json, its folder or a hub name in the local cache. With --runs, a
table of runs is answered instead: one entry of JSON for each row.

Intervals hold 8 of 10 runs by what public runs that were left out of the fit missed. The exit code is 0 if a strategy
fits, 2 for an invalid configuration and 6 if none fits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from samecurve.cli.commands import require_positive
from samecurve.config.documents import format_problems
from samecurve.config.schema_training import Batch
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.planner import answers, memory, model_config, overlap, printing, runs_file, search, step_time, strategies
from samecurve.planner.cluster import cluster
from samecurve.planner.coverage import left_out, optimizer_bytes, read_recipe, refuse
from samecurve.planner.search import Choice
from samecurve.planner.strategies import Wanted
from samecurve.storage.atomic import storage_errors

COLUMNS = "strategy", "tokens/s", "step s", "80 %", "memory GiB", "80 %", "verdict", "largest line"
CHECKPOINTING = {"none": "none", "full": "full", "offload": "full", "selective": "selective", "every_n_layers": "none"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_RECIPE", help="a recipe, config.json, folder or hub name")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values, batch sizes above all"
    )
    parser.add_argument("--cluster", metavar="KIND_OR_FILE", help="GPUs of a node, such as h100x8, or a cluster's YAML")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: the cluster's)")
    parser.add_argument("--strategy", action="append", metavar="FILE", help="only this file (default: all in configs/)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (default: %(default)s)")
    parser.add_argument("--why", action="store_true", help="also show each strategy that does not fit or cannot run")
    parser.add_argument("--overlap", action="store_true", help="also show which communication computation can hide")
    parser.add_argument("--runs", type=Path, metavar="RUNS.csv", help="answer every row of this table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers to this file")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if a strategy fits; raises TopologyError (6) if none does."""
    if arguments.runs:
        if not arguments.json:
            raise ConfigurationError("--runs: the answers need a file; add --json OUT.json")
        return _answer_table(arguments.runs, arguments.json)
    if not arguments.model or not arguments.cluster:
        raise ConfigurationError("plan needs MODEL_OR_RECIPE and --cluster, for example --cluster h100x8; or --runs")
    require_positive(arguments, "gpus", "top")
    machines = cluster(arguments.cluster)
    machines = machines.scaled(arguments.gpus) if arguments.gpus else machines
    wanted, limits = _wanted(arguments.model, arguments.overrides)
    paths = arguments.strategy or strategies.shipped()
    choices = search.evaluate(wanted, machines, paths)
    ordered = choices if arguments.strategy else search.ranked(choices)
    best = next((each for each in ordered if each.found and each.found.fits), None)
    if arguments.json:
        _write(arguments.json, {"plans": [_record(each) for each in ordered]})
    _print(ordered, best, arguments, wanted)
    print("".join(f"\nNot in these numbers: {each}" for each in limits), end="\n" if limits else "")
    if best is None:
        if not any(each.found for each in choices):
            raise ConfigurationError("\n".join(f"{each.name}: {each.reason}" for each in choices))
        more = search.fewest_gpus(wanted, machines, paths)
        micro = "batch.micro_batch_size, " if wanted.batch.micro_batch_size > 1 else ""
        smaller = f"reduce {micro}batch.sequence_length, or plan a recipe with memory.activation_checkpointing=full"
        hint = f"{more[1]} fits on {more[0]} GPUs" if more else smaller
        raise TopologyError(f"nothing fits on {machines.gpus} x {machines.kind}: {hint}")
    return 0


def _answer_table(path: Path, target: Path) -> int:
    found = [answers.answer(row) for row in runs_file.read(path)]
    _write(target, {"runs": found})
    unsupported = sum("unsupported" in each for each in found)
    print(f"{len(found)} runs answered{f', {unsupported} of them unsupported' if unsupported else ''}: {target}")
    return 0


def _write(path: Path, content: dict) -> None:
    with storage_errors(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _wanted(name: str, overrides: Sequence[str]) -> tuple[Wanted, list[str]]:
    """Read what is trained, and what of it the formulas leave out."""
    if not name.endswith((".yaml", ".yml")):
        fields = model_config.read(name)
        return Wanted(model_config.shape(fields, name), _batch(overrides)), []
    given = read_recipe(name, overrides)
    if given.recipe is None or given.document.problems:
        raise ConfigurationError(format_problems(given.document.problems))
    recipe = given.recipe
    refuse(recipe)
    source = f"{name}: model.{'config' if recipe.model.config else f'path {recipe.model.path}'}"
    fields = recipe.model.config or model_config.read(str(recipe.model.path), f"{source}: ")
    wanted = Wanted(
        model_config.shape(fields, source, recipe.tokenizer.vocabulary_size),
        recipe.batch,
        recipe.precision,
        CHECKPOINTING[recipe.memory.activation_checkpointing],
        recipe.loss.implementation != "full",
        optimizer_bytes(recipe),
        partial(read_recipe, name, overrides),
    )
    return wanted, left_out(recipe)


def _batch(overrides: Sequence[str]) -> Batch:
    """Read the batch of a bare model. Raises ConfigurationError for anything but the batch's keys."""
    sizes = {"global_batch_size": 256, "micro_batch_size": 1, "sequence_length": 4096}
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.removeprefix("batch.")
        if name not in sizes or not value.isdigit() or not int(value):
            legal = ", ".join(f"batch.{each}=N" for each in sizes)
            raise ConfigurationError(f"{override}: for a model without a recipe, expected one of {legal}")
        sizes[name] = int(value)
    return Batch(**sizes)


def _print(ordered: Sequence[Choice], best: Choice | None, arguments: argparse.Namespace, wanted: Wanted) -> None:
    if best and best.found and best.job:
        low, high = best.found.seconds_interval
        print(
            f"{best.name} on {best.job.layout.gpus} x {best.job.gpu_kind}: {best.tokens_per_s:,.0f} tokens/s, a step "
            f"in {best.found.seconds:.2f} s ({low:.2f} to {high:.2f}), {best.found.total_memory_gib:.1f} of "
            f"{best.job.memory_gib:.1f} GiB (80 % intervals; constants fitted to public runs, none measured here)"
        )
    print(
        f"{wanted.shape.parameters / 1e6:,.1f} million parameters, {wanted.batch.global_batch_size} rows of "
        f"{wanted.batch.sequence_length} tokens per step\n"
    )
    rows = [_row(each) for each in ordered if each.found and (arguments.strategy or arguments.why or each.found.fits)]
    if rows:
        print(printing.table([COLUMNS, *rows[: arguments.top]]))
    if arguments.why:
        print("".join(f"\n{each.name}: {each.reason}" for each in ordered if not each.found))
    shown = best or (ordered[0] if ordered and ordered[0].found else None)
    if shown and shown.job:
        print(f"\nMemory of {shown.name}; torch_allocated counts the lines above fragmentation:")
        for each in memory.anatomy(shown.job):
            print(printing.anatomy_table(each, shown.job.memory_gib))
        print()
        print(printing.step_table(step_time.breakdown(shown.job)))
        if arguments.overlap:
            rows = [[each.axis, f"{each.value:.3f}", each.verdict, each.inputs] for each in overlap.ratios(shown.job)]
            print("\n" + printing.table([("communication / computation", "ratio", "", "inputs"), *rows]))


def _row(choice: Choice) -> list[str]:
    assert choice.found
    found = choice.found
    low, high = found.seconds_interval
    share = found.total_memory_gib / found.memory_gib
    least, most = (value * share for value in found.memory_interval)
    return [
        choice.name, f"{choice.tokens_per_s:,.0f}", f"{found.seconds:.3f}", f"{low:.3f}-{high:.3f}",
        f"{found.total_memory_gib:.1f}", f"{least:.1f}-{most:.1f}", choice.verdict + choice.reason, found.binding,
    ]  # fmt: skip


def _record(choice: Choice) -> dict:
    if not choice.found:
        return {"strategy": choice.name, "reason": choice.reason}
    found = choice.found
    return {
        "strategy": choice.name,
        "tokens_per_second": choice.tokens_per_s,
        "step_seconds": found.seconds,
        "step_seconds_interval": found.seconds_interval,
        "peak_memory_gib": found.total_memory_gib,
        "verdict": choice.verdict,
        "binding": found.binding,
    }
