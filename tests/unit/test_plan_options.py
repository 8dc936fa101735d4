"""Options of `plan` that need others or exclude them, and what is printed where nothing fits."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from samecurve.cli import commands
from samecurve.cli.commands import Subcommand, main
from samecurve.errors import ConfigurationError, TopologyError

MODEL = "benchmarks/planner/llama_8b.json"
JOB = ("plan", MODEL, "--cluster", "h100x8")
TABLE = ("--runs", "runs.csv", "--json", "out.json")
TOO_SMALL = ("plan", MODEL, "--cluster", "a100_40gbx1", "--strategy", "configs/single.yaml")


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ("plan", MODEL, *TABLE, "--cluster", "h100x8", "--gpus", "3"),
            ["--runs runs.csv: each row says", "leave out MODEL_OR_RECIPE, --cluster, --gpus"],
        ),
        (("plan", "--runs", "runs.csv"), ["--runs: the predictions need a file; add --json OUT.json"]),
        (("plan", "--calibrate", "runs/a", "--json", "x"), ["plan needs MODEL_OR_RECIPE and --cluster"]),
        ((*JOB, "--rank", "0"), ["--rank 0: it has no effect alone; add --ranks or --dry_run"]),
        (
            (*JOB, "--rank", "3", "--launcher", "slurm"),
            ["--rank 3: it has", "--launcher slurm: it has no effect alone; add --output"],
        ),
        ((*JOB, "--gpus", "abc"), ["--gpus: found abc, but it must be a whole number, such as --gpus 8"]),
        ((*JOB, "--rows", "2.5"), ["--rows: found 2.5, but it must be a whole number"]),
    ],
)
def test_options_without_effect_are_errors(arguments, messages, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and not shown.err.startswith("usage")
    assert shown.err.count("it has no effect alone") == sum("it has" in each for each in messages)
    for message in messages:
        assert message in shown.err


def test_a_kind_of_gpu_in_any_case(capsys):
    assert main(["plan", MODEL, "--cluster", "H100x8", "--strategy", "configs/fsdp.yaml"]) == 0
    assert "on 8 x H100-80GB" in capsys.readouterr().out


@pytest.mark.parametrize("refusal", [None, ConfigurationError("--dry_run: not this one")])
def test_a_dry_run_where_nothing_fits(refusal, monkeypatch, capsys):
    """The choice that is shown is tracked; the exit code and the message stay."""
    tracked = []

    def track(plan, job, rank) -> int:
        tracked.append((plan.strategy.name, job.micro_batch, rank))
        if refusal:
            raise refusal
        return 0

    found = commands.importlib.import_module
    fake = SimpleNamespace(run=track)
    monkeypatch.setattr(
        commands.importlib,
        "import_module",
        lambda name, *more: fake if name == "samecurve.bench.dry_run" else found(name, *more),
    )
    assert main([*TOO_SMALL, "--dry_run"]) == 6
    assert tracked == [("single", 1, None)]
    *told, message = capsys.readouterr().err.splitlines()
    assert message.startswith("nothing fits on 1 x A100-40GB: ") and told == ([str(refusal)] if refusal else [])


def test_work_without_a_failure_keeps_its_own_code(monkeypatch):
    monkeypatch.setattr(commands.importlib, "import_module", lambda _: SimpleNamespace(run=lambda: 3))
    assert commands.do(Subcommand("any", ())) == 3
    with pytest.raises(TopologyError):
        commands.do(Subcommand("any", (), TopologyError("nothing fits")))


@pytest.mark.parametrize("terminals", [(), ("stdout",), ("stdout", "stderr")])
def test_a_terminal_shows_once_that_nothing_fits(terminals, monkeypatch, capsys):
    """Standard error has the message only where a terminal does not show it already as the first line."""
    for name in terminals:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
    assert main(TOO_SMALL) == 6
    shown = capsys.readouterr()
    assert shown.out.startswith("nothing fits on 1 x A100-40GB: ")
    assert shown.err.splitlines() == ([] if len(terminals) == 2 else shown.out.splitlines()[:1])
