"""Cost of a run of many steps afterwards: the start of a resume, its reports, and a comparison; seconds and memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from benchmarks.machine import commit, description
from benchmarks.markdown import table

ROOT = Path(__file__).resolve().parents[1]
SIZES = (10**4, 10**5, 10**6)
BEHIND = 100  # steps after the checkpoint that a resume repeats
EVALUATED = 1000  # steps between evaluations
RECIPE = {
    "output_dir": "run",
    "model": {"config": {"model_type": "llama"}},
    "data": {"path": "rows.jsonl"},
    "batch": {"global_batch_size": 8, "sequence_length": 1024},
    "optimizer": {"learning_rate": 1e-3},
}


def make(folder: Path, num_steps: int, seed: int) -> None:
    """Write a run directory whose metrics.jsonl has the keys of a CPU run's (training.meter), with random values."""
    from samecurve.config.schema import Recipe

    recipe = Recipe.model_validate(RECIPE | {"steps": num_steps}).model_dump(mode="json")
    facts = {"recipe": recipe, "recipe_path": "r.yaml", "overrides": [], "output_dir": "run", "strategy": "ddp"}
    facts |= {"strategy_path": "configs/ddp.yaml", "engine": "DDP", "world_size": 2, "device": "cpu"}
    facts |= {"precision": "fp32", "num_parameters": 10**6, "num_trained_parameters": 10**6, "data": {}}
    (folder / "checkpoints" / f"step_{num_steps - BEHIND:08d}").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "status.json").write_text(json.dumps({"state": "running", "step": num_steps}))
    draw = random.Random(seed).random
    with open(folder / "metrics.jsonl", "w") as stream:
        for step in range(1, num_steps + 1):
            record = {"step": step, "loss": 3 + draw(), "grad_norm": draw(), "learning_rate": draw() / 1e3}
            record |= {"tokens": 8192, "input_tokens": 8192, "samples": 8 * step, "epoch": step / 9973}
            record |= {"step_seconds": 0.2 + draw(), "tokens_per_second": 1e5 * draw(), "tflops_per_device": draw()}
            record |= {"mfu": None, "hfu": None, "peak_memory_gib": 1.25, "data_wait_fraction": draw() / 100}
            record |= {"skipped_steps": 0}
            if step % EVALUATED == 0:
                record |= {"eval_loss": 3 + draw(), "eval_perplexity": 20 * draw(), "eval_tokens": 10**5}
            stream.write(json.dumps(record) + "\n")


def _resume(run: Path, other: Path) -> None:
    from samecurve.run.run_directory import RunDirectory

    step = int(next((run / "checkpoints").iterdir()).name[5:])
    directory = RunDirectory(run, resume="auto")
    directory.begin(step, {"step": step})
    directory.close()


def _card(run: Path, other: Path) -> None:
    from samecurve.export.model_card import ExportInfo, write_card

    write_card(run, ExportInfo(), run)


def _compare(run: Path, other: Path) -> None:
    from samecurve.bench.jobs import Outcome, StrategyJob
    from samecurve.cli.compare import verdict

    facts = {"engine": "DDP", "world_size": 2}
    verdict([Outcome(StrategyJob(path.name, None, 2), facts, path, "", False, path) for path in (run, other)], 1e-5)


def _command(name: str, num_runs: int) -> Callable[[Path, Path], None]:
    def call(*runs: Path) -> None:
        from samecurve.cli import commands

        with contextlib.redirect_stdout(io.StringIO()):
            assert commands.main([name, *map(str, runs[:num_runs])]) == 0

    return call


ACTIONS = {
    "`summary`": _command("summary", 1),
    "`report`": _command("report", 1),
    "`report` of two runs": _command("report", 2),
    "verdict of `compare`, two runs": _compare,
    "model card with its curve": _card,
    "start of a resume": _resume,  # last: it shortens the run
}


def measured(action: str, runs: list[Path]) -> tuple[float, float]:
    """Run an action in a process of its own. Returns (CPU seconds with Python's start, peak resident set in MiB)."""
    code = "import sys; from pathlib import Path; from benchmarks.long_runs import ACTIONS\n"
    code += "ACTIONS[sys.argv[1]](*map(Path, sys.argv[2:]))"
    process = subprocess.Popen([sys.executable, "-c", code, action, *runs], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (action, status)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(folder: Path, log: Callable[[str], None]) -> dict[str, list[tuple[float, float]]]:
    """Measure each action for each size. Returns what `measured` does by action, in SIZES' order."""
    results: dict[str, list[tuple[float, float]]] = {action: [] for action in ACTIONS}
    for num_steps in SIZES:
        began, runs = time.perf_counter(), [folder / f"{num_steps} {name}" for name in "ab"]
        for seed, run in enumerate(runs):
            make(run, num_steps, seed)
        for action, of_sizes in results.items():
            of_sizes.append(measured(action, runs))
            log(f"{num_steps:,} steps, {action}: {of_sizes[-1][0]:.1f} s, {of_sizes[-1][1]:.0f} MiB")
        log(f"{num_steps:,} steps: {time.perf_counter() - began:.0f} s")
    return results


def page(results: dict[str, list[tuple[float, float]]]) -> str:
    """Return the page of `measure`'s results."""
    sizes = [f"{size:,}" for size in SIZES]
    columns = ["", *(f"{size}, s" for size in sizes), f"us per step more, {sizes[1]} to {sizes[2]}"]
    rows, memory = [], []
    for action, of_sizes in results.items():
        slope = (of_sizes[2][0] - of_sizes[1][0]) / (SIZES[2] - SIZES[1]) * 1e6
        rows.append([action, *(f"{seconds:.1f}" for seconds, _ in of_sizes), f"{slope:.1f}"])
        memory.append([action, *(f"{mib:.0f}" for _, mib in of_sizes), f"{of_sizes[2][1] / of_sizes[0][1]:.2f}"])
    return f"""# What a run of many steps costs afterwards

Measured on {date.today()} by `python scripts/bench_long_runs.py` at commit {commit("benchmarks/long_runs.md")}:
{description()};
a local disk. Other work ran on the machine, so that times are CPU seconds; they are those of the whole process with
its imports, measured once. Peaks are resident sets.

Each run is made on the spot: `metrics.jsonl` with the keys of a run on CPUs, an evaluation every {EVALUATED:,} steps.
The resume goes back by {BEHIND} steps. A verdict is what `compare` computes once its trainings have ended.

{table(columns, rows)}

Peak memory, MiB:

{table(["", *sizes, f"ratio, {sizes[2]} to {sizes[0]}"], memory)}

Each line of `metrics.jsonl` is read and checked once; a comparison of two runs reads both files side by side once more.
What is kept does not grow ([`history.py`](../samecurve/reports/history.py) has the rules); tests count lines, points
and records ([`test_plot.py`](../tests/unit/test_plot.py), [`test_jsonl.py`](../tests/unit/test_jsonl.py)).
"""
