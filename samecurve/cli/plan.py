"""Predict memory and step time of a job under each strategy, without a GPU and without weights.

MODEL_OR_RECIPE is a recipe, or a Hugging Face config.json, its folder or a hub name in the local cache. With --runs,
the command predicts every row of a table of runs instead, and writes one JSON entry per row.

Without --strategy, parallel sizes, micro-batches and recomputation are searched; key=value fixes a setting. Choices
that are as fast as the fastest one, as far as can be predicted, are ties, and the simplest of them is chosen.

An interval should contain 8 of 10 runs; its width comes from public runs that were left out of the fit. The exit code
is 0 if a strategy fits, 2 for an invalid configuration and 6 if none fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samecurve.cli.commands import Work, require_positive
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.launch.target import LAUNCHERS, check_launchers
from samecurve.planner import (
    all_ranks,
    answers,
    calibrate,
    calibration,
    emission,
    inputs,
    layout_picture,
    ledger,
    memory,
    overlap,
    placement,
    plan_text,
    printing,
    remedies,
    runs_file,
    search,
    shape_rules,
    step_time,
    strategies,
    strategy_files,
    timeline,
)
from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import Cluster
from samecurve.planner.cluster_file import cluster
from samecurve.planner.coverage import CHECKPOINTING, left_out
from samecurve.planner.hardware import canonical
from samecurve.planner.profiles import shipped as shipped_constants
from samecurve.planner.search import Choice
from samecurve.planner.strategy_files import Template
from samecurve.planner.wanted import Wanted
from samecurve.specs.environment import processor, versions
from samecurve.storage.atomic import storage_errors
from samecurve.strategy.plan import Plan

SHOWN_UNAVAILABLE = 3
SHOWN_SIZES = 3  # of one strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_RECIPE", help="a recipe, config.json, folder or hub name")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values, batch sizes above all"
    )
    parser.add_argument("--cluster", metavar="KIND_OR_FILE", help="GPUs of a node, such as h100x8, or a cluster's YAML")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: the cluster's)")
    parser.add_argument(
        "--strategy", action="extend", nargs="+", metavar="FILE", help="exactly these files (default: search configs/)"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (default: %(default)s)")
    parser.add_argument("--why", action="store_true", help="also show why the other strategies were not chosen")
    parser.add_argument("--overlap", action="store_true", help="also show which communication computation can hide")
    parser.add_argument("--ledger", action="store_true", help="also list the bytes of each collective per step")
    parser.add_argument("--shapes", action="store_true", help="also judge the model's dimensions on this kind of GPU")
    parser.add_argument("--layout", action="store_true", help="also draw which rank is where, and its groups' links")
    text = "also simulate a step and failures of nodes, and find the best checkpoint interval"
    parser.add_argument("--simulate", action="store_true", help=text)
    text = "write the drawing of --layout, or the timeline of --simulate, to this file"
    parser.add_argument("--svg", type=Path, metavar="FILE", help=text)
    parser.add_argument("--order", metavar="AXES", default="tp,cp,dp,pp", help="for --layout (default: %(default)s)")
    parser.add_argument(
        "--ranks", action="store_true", help="also resolve every rank, and check that they fit together"
    )
    parser.add_argument("--dry-run", action="store_true", help="also track the memory of one rank on fake tensors")
    text = "the rank of --ranks and --dry-run (default: %(default)s)"
    parser.add_argument("--rank", type=int, default=0, metavar="R", help=text)
    parser.add_argument("--emit", metavar="DIR", help="write the files that start the best plan to this folder")
    listed = f"for --emit: {', '.join(LAUNCHERS)} (default: all)"
    parser.add_argument("--launcher", action="extend", nargs="+", metavar="NAME", help=listed)
    text = "learn from these finished runs and results of bench, or read this calibration file"
    parser.add_argument("--calibrate", action="extend", nargs="+", type=Path, metavar="PATH", help=text)
    parser.add_argument("--runs", type=Path, metavar="RUNS.csv", help="predict every row of this table of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions to this file")


def run(arguments: argparse.Namespace) -> int | Work:
    """Run the command: 0, or the work of --dry-run, if a strategy fits. Raises TopologyError (6) if none does."""
    learnt = _learnt(arguments)
    if arguments.runs:
        if not arguments.json:
            raise ConfigurationError("--runs: the predictions need a file; add --json OUT.json")
        return _answer_table(arguments.runs, arguments.json, learnt)
    if learnt and not arguments.model:
        return 0
    _settle(arguments)
    whole = _calibrated(cluster(arguments.cluster), learnt)
    machines = whole.scaled(arguments.gpus) if arguments.gpus else whole
    wanted = inputs.read(arguments.model, arguments.overrides)
    shipped = strategy_files.shipped()
    asked = [strategy_files.read(path) for path in arguments.strategy or ()] or shipped
    choices, lacking = _choices(wanted, machines, asked, bool(arguments.strategy))
    if all(each.invalid for each in choices):  # exit code 2; valid ones that do not fit are 6
        raise ConfigurationError("\n".join(f"{each.name}: {each.reason}" for each in choices))
    order = search.ranked(choices)
    best = order[0] if order[0].found and order[0].found.fits else None
    if arguments.json:
        plans = [plan_text.record(each) for each in [*choices, *lacking]]
        _write(arguments.json, {"plans": plans, "constants": shipped_constants()})
    if best:
        first_line = plan_text.answer(best, sum(each.tie for each in order) - best.tie)
    else:
        fixed = frozenset(inputs.SEARCHED) if arguments.strategy else wanted.fixed
        hint = remedies.smallest_change(replace(wanted, fixed=fixed), machines, whole, asked, shipped)
        first_line = f"nothing {'fits' if order[0].job else 'can run'} on {machines.gpus} x {machines.kind}: {hint}"
    print(f"{first_line}\n{plan_text.job_size(wanted)}\n")
    _print_table(choices, lacking, arguments)
    assert wanted.source.recipe
    limits = left_out(wanted.source.recipe)
    print("".join(f"\nNot in these numbers: {each}" for each in limits), end="\n" if limits else "")
    if arguments.why or arguments.strategy:
        _print_rejected(choices, wanted, whole)
    _print_details(order[0], wanted, machines, arguments)
    if best is None:
        reasons = [] if order[0].job else [f"{each.name}: {each.reason}" for each in choices]
        raise TopologyError("\n".join([first_line, *reasons]))
    if arguments.emit:
        request = emission.Request(arguments.model, tuple(arguments.overrides))
        paths = emission.emit(arguments.emit, best, wanted, machines, request, arguments.launcher or LAUNCHERS)
        print(f"\nwritten and read back: {', '.join(paths)}")
    return _dry_run(best, wanted, machines, arguments.rank) if arguments.dry_run else 0


def _dry_run(chosen: Choice, wanted: Wanted, machines: Cluster, rank: int) -> Work:
    """Return the work of tracking a rank of a choice, with its micro-batch size and recomputation."""
    assert chosen.job and chosen.template and wanted.source.recipe
    _check_rank(chosen, rank)
    changed = wanted.with_memory(chosen.job.micro_batch, chosen.job.checkpointing)
    strategy, _ = strategies.describe(changed, chosen.template, chosen.sizes or {}, machines.gpus)
    recipe = wanted.source.recipe
    kept = CHECKPOINTING[recipe.memory.activation_checkpointing] == chosen.job.checkpointing
    kind = {} if kept else {"activation_checkpointing": chosen.job.checkpointing}
    memory_block = recipe.memory.model_copy(update=kind)
    recipe = recipe.model_copy(update={"batch": changed.batch, "memory": memory_block, "compile": "off"})
    return Work("samecurve.bench.dry_run", (Plan(recipe, strategy, "", ()), chosen.job, rank))


def _check_rank(chosen: Choice, rank: int) -> None:
    assert chosen.job
    if not 0 <= rank < chosen.job.layout.gpus:
        raise ConfigurationError(f"--rank {rank}: {chosen.name} has ranks 0 to {chosen.job.layout.gpus - 1}")


def _check_ranks(shown: Choice, wanted: Wanted, rank: int) -> None:
    """Print what all ranks of a choice resolve to. Raises TopologyError if they do not fit together."""
    assert shown.job and shown.template
    _check_rank(shown, rank)
    chosen = wanted.with_memory(shown.job.micro_batch, shown.job.checkpointing)
    text, good = all_ranks.report(chosen, shown.template, shown.sizes or {}, shown.job, rank)
    print(f"\n{text}")
    if not good:
        raise TopologyError(f"{shown.name}: its ranks do not fit together; see above")


def _settle(arguments: argparse.Namespace) -> None:
    """Check the arguments; an override behind --strategy FILE is one, although the option takes several."""
    for name in ("strategy", "launcher"):
        given = getattr(arguments, name) or []
        setattr(arguments, name, [each for each in given if "=" not in each])
        arguments.overrides = [*arguments.overrides, *(each for each in given if "=" in each)]
    check_launchers(arguments.launcher)
    arguments.order = placement.read_order(arguments.order)
    if not arguments.model or not arguments.cluster:
        raise ConfigurationError("plan needs MODEL_OR_RECIPE and --cluster, for example --cluster h100x8; or --runs")
    if arguments.svg and arguments.layout and arguments.simulate:
        raise ConfigurationError("--svg: --layout and --simulate draw different pictures; give one of them")
    require_positive(arguments, "gpus", "top")


def _learnt(arguments: argparse.Namespace) -> Calibration | None:
    """Learn from the runs of --calibrate and print what changed; an override behind them is one."""
    given = arguments.calibrate or []
    paths = [each for each in given if "=" not in str(each) or each.exists()]
    arguments.overrides = [*arguments.overrides, *(str(each) for each in given if each not in paths)]
    if not paths:
        return None
    learnt, text = calibrate.from_paths(paths)
    print(f"{text}\n")
    return learnt


def _calibrated(machines: Cluster, learnt: Calibration | None) -> Cluster:
    """Add what was learnt on such machines, now or earlier; say where hardware or versions differ."""
    kind = canonical(machines.kind)
    learnt = learnt or calibration.read(calibration.default_path(kind))
    if learnt:
        for each in learnt.warnings(kind, processor(), versions()):
            print(f"warning: {learnt.path}: {each}")
    return replace(machines, calibration=learnt)


def _answer_table(path: Path, target: Path, learnt: Calibration | None) -> int:
    found = [answers.answer(row, learnt) for row in runs_file.read(path)]
    _write(target, {"runs": found})
    unsupported = sum("unsupported" in each for each in found)
    print(f"{len(found)} runs answered{f', {unsupported} of them unsupported' if unsupported else ''}: {target}")
    return 0


def _write(path: Path, content: dict) -> None:
    with storage_errors(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _choices(
    wanted: Wanted, machines: Cluster, templates: Sequence[Template], exact: bool
) -> tuple[list[Choice], list[Choice]]:
    """Return the choices, and those that this version cannot run."""
    if exact:
        return search.evaluate(wanted, machines, templates), []
    return search.search(wanted, machines, templates), search.unavailable(wanted, machines, templates)


def _print_table(choices: Sequence[Choice], lacking: Sequence[Choice], arguments: argparse.Namespace) -> None:
    rows = [each for each in choices if each.found and (arguments.strategy or arguments.why or each.found.fits)]
    if rows:
        few = rows if arguments.strategy or arguments.why else plan_text.at_most(SHOWN_SIZES, rows)
        print(plan_text.table(few[: arguments.top]))
    if lacking:
        shown = plan_text.table(lacking[:SHOWN_UNAVAILABLE])
        grey, normal = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"\nFor comparison, what this version cannot run and --emit never writes:\n{grey}{shown}{normal}")


def _print_rejected(choices: Sequence[Choice], wanted: Wanted, whole: Cluster) -> None:
    """Print one line for each strategy of which no size fits."""
    chosen = {each.name for each in choices if each.found and each.found.fits}
    out = dict.fromkeys(each.name for each in choices if each.name not in chosen)
    if out:
        print("\nNot chosen:")
    for name in out:
        first = next(each for each in choices if each.name == name)
        more = None
        if first.job and first.template:
            more = remedies.fewest_gpus(wanted, whole, [first.template], first.job.layout.gpus)
        print(plan_text.rejection(first, more))


def _print_details(shown: Choice, wanted: Wanted, machines: Cluster, arguments: argparse.Namespace) -> None:
    """Print what is asked for beside the table, about the answer or, where nothing fits, what comes nearest."""
    job = shown.job
    if not job:
        return
    print(f"\nMemory of {shown.name}; torch_allocated counts the lines above fragmentation:")
    for each in memory.anatomy(job):
        print(printing.anatomy_table(each, job.memory_gib))
    print("\n" + printing.step_table(step_time.breakdown(job)))
    if arguments.overlap:
        rows = [[each.axis, f"{each.value:.3f}", each.verdict, each.inputs] for each in overlap.ratios(job)]
        print("\n" + printing.table([("communication / computation", "ratio", "", "inputs"), *rows]))
    if arguments.ledger:
        tables = [printing.ledger_table(stage, each) for stage, each in ledger.ledgers(job).items() if each]
        print("\n" + ("\n".join(tables) or "One process exchanges nothing."))
    if arguments.shapes:
        print(f"\nShapes on {job.gpu_kind} with {shape_rules.sms(job.gpu_kind)} SMs:")
        print(printing.table(shape_rules.table(job)))
        print("\n".join(shape_rules.complaints(job)) or "Every dimension divides as it should.")
    rows_per_step = wanted.batch.global_batch_size
    if arguments.layout:
        print("\n" + layout_picture.text(job, rows_per_step, arguments.order))
    drawn = layout_picture.svg(job, rows_per_step, arguments.order) if arguments.svg else ""
    if arguments.simulate:
        assert wanted.source.recipe
        text, drawn = timeline.report(job, machines, wanted.source.recipe.checkpoint)
        print("\n" + text)
    if arguments.svg:
        with storage_errors(arguments.svg):
            arguments.svg.write_text(drawn, encoding="utf-8")
    if arguments.ranks:
        _check_ranks(shown, wanted, arguments.rank)
