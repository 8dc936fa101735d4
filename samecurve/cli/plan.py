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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from samecurve.cli.commands import Subcommand, require_positive, whole_number
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.launch.target import LAUNCHERS, check_launchers
from samecurve.planner import (
    answers,
    calibrate,
    calibration,
    emission,
    inputs,
    ledger,
    memory,
    overlap,
    placement,
    plan_text,
    remedies,
    search,
    shape_rules,
    step_time,
    strategies,
)
from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import read_cluster
from samecurve.planner.hardware import canonical, is_unknown
from samecurve.planner.hardware import shipped as shipped_constants
from samecurve.planner.inputs import PlanRequest, checkpointing, left_out
from samecurve.planner.search import Choice
from samecurve.specs.environment import processor, versions
from samecurve.storage.atomic import storage_errors
from samecurve.strategy.plan import Plan
from samecurve.strategy.resolve import strategy_path, taken_values

ROWS = 10  # of the table
SHOWN_SIZES = 3  # of one strategy
_OF_TABLES = {"runs", "json", "calibrate"}  # all that --runs takes
# Options, and those of which each needs one.
_NEEDED = {"rank": ("ranks", "dry_run"), "launcher": ("output",)}
_POSITIONAL = {"model": "MODEL_OR_RECIPE", "overrides": "key=value"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL_OR_RECIPE", help="a recipe, config.json, folder or hub name")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values, batch sizes above all"
    )
    parser.add_argument("--cluster", metavar="KIND_OR_FILE", help="GPUs of a node, such as h100x8, or a cluster's YAML")
    parser.add_argument(
        "--gpus", type=whole_number("--gpus"), metavar="N", help="number of GPUs (default: the cluster's)"
    )
    parser.add_argument(
        "--strategy",
        action="extend",
        nargs="+",
        metavar="STRATEGY",
        help="exactly these: names in configs/, or files (default: all of configs/). Of a single one, values that the "
        "recipe does not give are read, as in a run",
    )
    parser.add_argument("--rows", type=whole_number("--rows"), metavar="N", help=f"rows of the table (default: {ROWS})")
    parser.add_argument("--why", action="store_true", help="also show why the other strategies were not chosen")
    parser.add_argument("--overlap", action="store_true", help="also show which communication computation can hide")
    parser.add_argument("--ledger", action="store_true", help="also list the bytes of each collective per step")
    parser.add_argument("--shapes", action="store_true", help="also judge the model's dimensions on this kind of GPU")
    parser.add_argument("--layout", action="store_true", help="also draw which rank is where, and its groups' links")
    parser.add_argument("--ranks", action="store_true", help="also describe place, rows and micro-batches of --rank")
    parser.add_argument("--dry_run", action="store_true", help="also track the memory of one rank on fake tensors")
    text = "the rank of --ranks and --dry_run (default: 0, and of a pipeline's dry run one of each class)"
    parser.add_argument("--rank", type=whole_number("--rank"), metavar="R", help=text)
    parser.add_argument("--output", metavar="FOLDER", help="write the files that start the best plan to this folder")
    listed = f"for --output: {', '.join(LAUNCHERS)} (default: all)"
    parser.add_argument("--launcher", action="extend", nargs="+", metavar="NAME", help=listed)
    text = "learn from finished runs and results of bench matmul, collectives and memory, or read a calibration file"
    parser.add_argument("--calibrate", action="extend", nargs="+", type=Path, metavar="PATH", help=text)
    parser.add_argument("--runs", type=Path, metavar="RUNS.csv", help="predict every row of this table of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions to this file")


def run(arguments: argparse.Namespace) -> int | Subcommand:
    """Run the command: 0, or the work of --dry_run, if a strategy fits. Raises TopologyError (6) if none does."""
    paths = _settle(arguments)
    if arguments.runs:
        return _answer_table(arguments.runs, arguments.json, paths)
    if not arguments.model:
        learnt, text = calibrate.from_paths(paths)
        print(text or learnt.describe())
        return 0
    whole = read_cluster(arguments.cluster)
    machines = whole.scaled(arguments.gpus) if arguments.gpus else whole
    shipped = strategies.shipped()
    asked = [strategies.read(strategy_path(given)) for given in arguments.strategy or ()] or shipped
    taken: dict[str, str] = {}
    fill = strategies.filling(asked[0], machines.gpus, taken) if len(asked) == 1 else None
    request = inputs.read(arguments.model, arguments.overrides, fill)
    learnt, notes = _learnt(canonical(machines.kind), paths)
    notes += taken_values(request.source, taken)
    whole, machines = (replace(size, calibration=learnt) for size in (whole, machines))
    find = search.evaluate if arguments.strategy else search.search
    choices = find(request, machines, asked)
    if all(choice.invalid for choice in choices):  # exit code 2; valid ones that do not fit are 6
        print("\n".join(notes), end="\n" if notes else "")  # what was learnt is written already
        raise ConfigurationError("\n".join(f"{choice.name}: {choice.reason}" for choice in choices))
    order = search.ranked(choices)
    best = order[0] if order[0].prediction and order[0].prediction.fits else None
    if arguments.json:
        plans = [plan_text.record(choice) for choice in choices]
        _write(arguments.json, {"plans": plans, "constants": shipped_constants()})
    first_line = plan_text.answer(best, sum(choice.tie for choice in order) - best.tie) if best else ""
    exact = replace(request, fixed=frozenset(inputs.SEARCHED)) if arguments.strategy else request
    if not best:
        hint = remedies.smallest_change(exact, machines, whole, asked, shipped)
        first_line = f"nothing {'fits' if order[0].job else 'can run'} on {machines.gpus} x {machines.kind}: {hint}"
    print(
        "\n".join([first_line, plan_text.job_size(request), plan_text.inputs_line(machines, order[0].job), *notes, ""])
    )
    _print_table(choices, arguments)
    limits = left_out(request, machines.card)
    print("".join(f"\nNot in these numbers: {limit}" for limit in limits), end="\n" if limits else "")
    if arguments.why or arguments.strategy:
        rejected = remedies.rejected(choices, exact, whole, bool(arguments.strategy))
        print("\n".join(["\nNot chosen:", *rejected]) if rejected else "", end="\n" if rejected else "")
    print("".join(f"\n{section}\n" for section in _sections(order[0], request, arguments)), end="")
    failure = None if best else _nothing_fits(first_line, choices, order[0])
    if best and arguments.output:
        typed = emission.Typed(arguments.model, tuple(arguments.overrides))
        written = emission.emit(arguments.output, best, exact, machines, typed, arguments.launcher or LAUNCHERS)
        print(f"\nwritten and read back: {', '.join(written)}")
    if arguments.dry_run and order[0].job:
        return _dry_run(order[0], request, arguments.rank)._replace(failure=failure)
    if failure:
        raise failure
    return 0


def _nothing_fits(first_line: str, choices: Sequence[Choice], shown: Choice) -> TopologyError:
    """Return the error of a plan without a fitting choice; a terminal shows the answer's line already."""
    reasons = [] if shown.job else [f"{choice.name}: {choice.reason}" for choice in choices]
    is_shown = sys.stdout.isatty() and sys.stderr.isatty()
    error = TopologyError("\n".join([*([] if is_shown else [first_line]), *reasons]))
    error.is_printed = is_shown and not reasons
    return error


def _dry_run(chosen: Choice, request: PlanRequest, rank: int | None) -> Subcommand:
    """Return the work of tracking a rank of a choice, with its micro-batch size and recomputation."""
    assert chosen.job and request.source.recipe
    _check_rank(chosen, rank or 0)
    changed = request.with_memory(chosen.job.micro_batch, chosen.job.checkpointing)
    recipe = request.source.recipe
    kept = checkpointing(recipe.memory) == chosen.job.checkpointing
    kind = {} if kept else {"activation_checkpointing": chosen.job.checkpointing}
    memory_block = recipe.memory.model_copy(update=kind)
    model_block = recipe.model.model_copy(update={"kernels": "torch"})
    counted = {"batch": changed.batch, "memory": memory_block, "model": model_block, "compile": "off", "fp8": "off"}
    recipe = recipe.model_copy(update=counted)
    # the rank's rows are of one sequence
    job = replace(chosen.job, micro_batch=chosen.job.micro_batch * chosen.job.sequences, sequences=1)
    return Subcommand("samecurve.bench.dry_run", (Plan(recipe, job.strategy, "", ()), job, rank))


def _check_rank(chosen: Choice, rank: int) -> None:
    assert chosen.job
    if not 0 <= rank < chosen.job.dims.world_size:
        raise ConfigurationError(f"--rank {rank}: {chosen.name} has ranks 0 to {chosen.job.dims.world_size - 1}")


def _settle(arguments: argparse.Namespace) -> list[Path]:
    """Check the arguments; an override behind --strategy FILE is one, although the option takes several.

    Returns:
        The paths of --calibrate.

    Raises:
        ConfigurationError: options have no effect, and what each needs, or are missing.
    """
    for name in ("strategy", "launcher", "calibrate"):
        given = getattr(arguments, name) or []
        values = [word for word in given if "=" in str(word) and not (name == "calibrate" and word.exists())]
        setattr(arguments, name, [word for word in given if word not in values])
        arguments.overrides = [*arguments.overrides, *map(str, values)]
    given = {name: value for name, value in vars(arguments).items() if value is not False and value not in (None, [])}
    problems = []
    if arguments.runs:
        beside = [name for name in (*_POSITIONAL, *sorted(given)) if name in given.keys() - _OF_TABLES]
        named = ", ".join(_option(name) for name in dict.fromkeys(beside))
        problems += (
            [f"--runs {arguments.runs}: each row says its model and machines; leave out {named}"] if named else []
        )
        problems += [] if arguments.json else ["--runs: the predictions need a file; add --json OUT.json"]
    elif given.keys() != {"calibrate"}:  # which learns, without a plan
        if not {"model", "cluster"} <= given.keys():
            problems.append("plan needs MODEL_OR_RECIPE and --cluster, for example --cluster h100x8; or --runs")
        for name, needed in _NEEDED.items():
            if name in given and not given.keys() & set(needed):
                words = " ".join(given[name]) if isinstance(given[name], list) else given[name]
                fix = f"add {' or '.join(map(_option, needed))}"
                problems.append(f"{_option(name)} {words}: it has no effect alone; {fix}")
    if problems:
        raise ConfigurationError("\n".join(problems))
    check_launchers(arguments.launcher)
    require_positive(arguments, "gpus", "rows")
    return arguments.calibrate


def _learnt(kind: str, paths: Sequence[Path]) -> tuple[Calibration | None, list[str]]:
    """Find what was learnt on such machines, now or earlier.

    Args:
        kind: of the GPUs that are planned for.
        paths: of --calibrate.

    Returns:
        The calibration, and what to print about it: what was learnt, and where hardware or versions differ.
    """
    given, text = calibrate.from_paths(paths) if paths else (None, "")
    notes = ["", text] if text else []
    earlier = calibration.read(calibration.default_path(kind)) if not given or given.kind != kind else None
    for known in filter(None, (given, earlier)):
        notes += [f"warning: {known.path}: {note}" for note in known.warnings(kind, processor(), versions())]
    return (given if given and given.kind == kind else earlier), notes


def _answer_table(path: Path, target: Path, paths: Sequence[Path]) -> int:
    rows = answers.read_runs(path)
    learnt, text = calibrate.from_paths(paths) if paths else (None, "")
    predictions = [answers.answer(row, learnt) for row in rows]
    _write(target, {"runs": predictions})
    unsupported = sum("unsupported" in prediction for prediction in predictions)
    print(f"{len(predictions)} runs answered{f', {unsupported} of them unsupported' if unsupported else ''}: {target}")
    strange = dict.fromkeys(kind for row in rows if is_unknown(kind := row["gpu"].strip()))
    print(f"unknown GPUs, counted as an A100 (column gpu): {', '.join(strange)}\n" if strange else "", end="")
    print(f"\n{text}" if text else "", end="\n" if text else "")
    return 0


def _write(path: Path, content: dict) -> None:
    with storage_errors(path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print_table(choices: Sequence[Choice], arguments: argparse.Namespace) -> None:
    everything = arguments.strategy or arguments.why
    rows = [choice for choice in choices if choice.prediction and (everything or choice.prediction.fits)]
    if rows:
        few = rows if everything else plan_text.at_most(SHOWN_SIZES, rows)
        print(plan_text.table(few[: arguments.rows or ROWS]))


def _option(option: str) -> str:
    return _POSITIONAL.get(option, f"--{option}")


def _sections(shown: Choice, request: PlanRequest, arguments: argparse.Namespace) -> Iterator[str]:
    """Generate the sections about the answer or, where nothing fits, what comes nearest: what the options ask for."""
    if not (job := shown.job):
        return
    tables = [plan_text.anatomy_table(stage) for stage in memory.anatomy(job)]
    yield "\n".join([f"Memory of {shown.name}; torch_allocated counts the lines above fragmentation:", *tables])
    yield plan_text.step_table(step_time.breakdown(job))
    if arguments.overlap:
        rows = [[ratio.axis, f"{ratio.value:.3f}", ratio.verdict, ratio.inputs] for ratio in overlap.ratios(job)]
        yield plan_text.aligned([("communication / computation", "ratio", "", "inputs"), *rows])
    if arguments.ledger:
        tables = [plan_text.ledger_table(stage, part) for stage, part in ledger.ledgers(job).items() if part]
        yield "\n".join(tables) or "One process exchanges nothing."
    if arguments.shapes:
        complaints = "\n".join(shape_rules.complaints(job)) or "Every dimension divides as it should."
        yield f"{shape_rules.title(job)}\n{plan_text.aligned(shape_rules.table(job))}\n{complaints}"
    if arguments.layout:
        yield placement.picture(job, request.batch.global_batch_size)
    if arguments.ranks:
        _check_rank(shown, arguments.rank or 0)
        batch = request.with_memory(job.micro_batch, job.checkpointing).batch
        yield placement.report(batch, job, arguments.rank or 0)
