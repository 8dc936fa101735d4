"""Train a recipe once for each combination of values, and compare the runs by their held-out loss.

A key with several values is swept: `optimizer.learning_rate=1e-4,3e-4 seed=0,1` makes four runs, each with a directory
of its own in the sweep's folder. Commas inside brackets, braces and quotes do not separate values.

The same command goes on after a stop: finished runs are skipped, others resume from their last checkpoint. Failed runs
do not stop the sweep. With --slurm, the runs become a job array, and the same command without it shows their results.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from samecurve.bench import jobs
from samecurve.cli.commands import require_positive
from samecurve.config import loader as recipes
from samecurve.config.inheritance import latest_overrides
from samecurve.errors import ConfigurationError
from samecurve.launch import scripts
from samecurve.launch.target import Target, unnamed
from samecurve.metrics.console import number
from samecurve.reports.plot import LARGE, Scale, Series, plot
from samecurve.reports.run_report import MOST_RUNS, render_run_page
from samecurve.reports.run_summary import Run
from samecurve.run.sessions import RUN_FACTS
from samecurve.run.status import STATUS, read_status
from samecurve.storage.atomic import storage_errors, write_text
from samecurve.storage.records import read_record
from samecurve.strategy.resolve import STRATEGY_HELP, strategy_path

_OUTSIDE = r"""(?:[^,\[\]{}"']|\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*')+"""
COLUMNS = ("run", "state", "steps", "loss", "held-out loss", "lowest")


class Member(NamedTuple):
    """One run of a sweep. name: the values that differ between runs. overrides: all values, without output_dir."""

    name: str
    directory: Path
    overrides: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/sft.yaml")
    parser.add_argument("overrides", metavar="key.path=value,value", nargs="+", help="recipe values; several are swept")
    parser.add_argument("--strategy", metavar="STRATEGY", type=strategy_path, help=STRATEGY_HELP)
    parser.add_argument("--num_processes", type=int, metavar="N", default=1, help="processes per run (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the sweep's folder (default: runs/sweep/RECIPE)")
    parser.add_argument("--slurm", type=Path, metavar="FILE", help="write a job array for SLURM, and start nothing")
    parser.add_argument("--nodes", type=int, metavar="N", default=1, help="with --slurm: nodes per run (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0 if every run is done, or their job array is written."""
    require_positive(arguments, "num_processes", "nodes")
    if arguments.num_processes > 1 and not arguments.strategy:
        raise ConfigurationError(f"--num_processes {arguments.num_processes}: needs --strategy, for example ddp")
    output = arguments.output or Path("runs/sweep") / Path(arguments.recipe).stem
    members = list(combinations(arguments.overrides, output))
    problems: dict[str, str] = {}
    for member in members:
        try:
            recipes.load_recipe(arguments.recipe, [*member.overrides, f"output_dir={member.directory}"])
        except ConfigurationError as error:
            problems.setdefault(str(error), member.name)
    if problems:
        raise ConfigurationError("\n".join(f"run {name}: {text}" for text, name in problems.items()))
    if arguments.slurm:
        _write_array(arguments, members)
        return 0
    strategy = Path(arguments.strategy) if arguments.strategy else None
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    for index, member in enumerate(members, 1):
        title = f"run {index} of {len(members)}, {member.name}"
        if is_done(member):
            print(f"{title}: done already", flush=True)
            continue
        print(f"{title}: log in {member.directory}.log", flush=True)
        job = jobs.StrategyJob(member.name, strategy, arguments.num_processes)
        command = jobs.command(job, arguments.recipe, member.overrides, member.directory)
        log = member.directory.with_name(f"{member.directory.name}.log")
        with storage_errors(log), open(log, "a", encoding="utf-8") as stream:
            with jobs.processes(command, stream, arguments.num_processes) as process:
                code = process.wait()
        if code:
            code = jobs.exit_code_of(member.directory, log, code)
            print(f"  ended with exit code {code}: {jobs.reason_of(member.directory, log, code)}", flush=True)
    print(f"\n{compare(members, output)}")
    return 0 if all(is_done(member) for member in members) else 1


def combinations(given: Sequence[str], output: Path) -> Iterator[Member]:
    """Yield the runs of all combinations of values, in the order of the arguments. Raises ConfigurationError."""
    settings: dict[str, list[str]] = {}
    for argument in latest_overrides(given):
        key, _, text = argument.partition("=")
        values = re.findall(_OUTSIDE, text)
        if ",".join(values) != text:
            values = [text]  # not closed, or empty: the recipe's own reader reports it
        if len(set(values)) < len(values):
            raise ConfigurationError(f"{argument}: a value is given twice; keep one")
        settings[key] = values
    swept = [key for key, values in settings.items() if len(values) > 1]
    if not swept:
        raise ConfigurationError("no key has several values; for example optimizer.learning_rate=1e-4,3e-4")
    if clash := {"output_dir", "checkpoint.mirror"} & settings.keys():
        raise ConfigurationError(f"{min(clash)}: each run of a sweep has its own; use --output FOLDER for all")
    short = {key: key.rpartition(".")[2] for key in swept}
    twice = len(set(short.values())) < len(short)
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        name = ",".join(f"{key if twice else short[key]}={chosen[key]}" for key in swept)
        folder = output / re.sub(r"[^\w.,=+-]+", "-", name)
        yield Member(name, folder, [f"{key}={value}" for key, value in chosen.items()])


def is_done(member: Member) -> bool:
    """Whether the run is finished, and was started with the same values."""
    if read_status(member.directory / STATUS).get("state") != "done":
        return False
    facts = read_record(member.directory / "run.json", {**RUN_FACTS, "overrides?": [str]}).value or {}
    own = ("output_dir=", "checkpoint.mirror=")
    return [text for text in facts.get("overrides", ()) if not text.startswith(own)] == member.overrides


def compare(members: Sequence[Member], output: Path) -> str:
    """Write table.md, the picture losses.svg and report.html about the runs. Returns what to print."""
    runs = [Run.read(member.directory) for member in members]
    rows, ranked = [], []
    for member, run in zip(members, runs, strict=True):
        history = run.history
        last, lowest = (history.curves.get("eval_loss") or [(0, None)])[-1][1], history.lowest("eval_loss")
        # of a long run, a point of the curve is the lowest or the highest of several evaluations
        last = last and history.ends["eval_loss"][1]
        state = "done" if is_done(member) else run.status.get("state", "not started")
        where = f"{number(lowest[0])} at step {lowest[1]}" if lowest else ""
        loss = history.last.get("loss")
        shown = ["" if value is None else number(value) for value in (loss, last)]
        rows.append((member.name, state, str(history.last.get("step", 0)), *shown, where))
        if state == "done" and last is not None:
            ranked.append((last, member))
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    best = "no run has a held-out loss yet; evaluate.every_steps=N measures it"
    if ranked:
        value, member = min(ranked, key=lambda item: item[0])
        export = shlex.join(["python", "-m", "samecurve", "export", str(member.directory), "--dtype", "bf16"])
        best = f"best: {member.name}, held-out loss {number(value)} at its end; to export it:\n  {export}"
    key = "eval_loss" if ranked else "loss"
    series = [Series(member.name, run.history.curves.get(key, []), index)
              for index, (member, run) in enumerate(zip(members, runs, strict=True))]  # fmt: skip
    files = {"table.md": "\n".join([*lines, ""])}
    if drawn := plot("held-out loss" if ranked else "loss", series, scale=Scale(logarithmic=True), size=LARGE):
        files["losses.svg"] = drawn
    begun = [run for run in runs if run.known]
    if 0 < len(begun) <= MOST_RUNS:
        files["report.html"] = render_run_page(begun)
    for name, text in files.items():
        write_text(output / name, text)
    return "\n".join([*lines, "", *(str(output / name) for name in files), best])


def _write_array(arguments: argparse.Namespace, members: Sequence[Member]) -> None:
    """Write the job array: the script of `launch --launcher slurm`, with values by the number of the task."""
    if not arguments.strategy:
        raise ConfigurationError("--slurm: needs --strategy, for example ddp")
    hosts = unnamed(arguments.nodes, arguments.num_processes)
    script = scripts.text("slurm", Target(arguments.recipe, arguments.strategy, (), hosts, file=str(arguments.slurm)))
    cases = ["case $SLURM_ARRAY_TASK_ID in"]
    for index, member in enumerate(members):
        values = shlex.join([*member.overrides, f"output_dir={member.directory}", "checkpoint.mirror=null"])
        cases.append(f'{index}) set -- {values} "$@" ;;')
    script = script.replace("#SBATCH --job-name", f"#SBATCH --array=0-{len(members) - 1}\n#SBATCH --job-name", 1)
    # a job that returns to the queue is this task alone, not the array
    script = script.replace('requeue "$SLURM_JOB_ID"', 'requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"')
    script = script.replace("\ncode=0\n", "\n" + "\n".join([*cases, "esac", "code=0", ""]), 1)
    write_text(arguments.slurm, script)
    print(f"{len(members)} runs: sbatch {shlex.quote(str(arguments.slurm))}")
