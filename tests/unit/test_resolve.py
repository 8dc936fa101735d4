"""Which strategy, which launcher, how many processes."""

# ruff: noqa: E501 - one problem, one line

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from report_cases import (
    ACCELERATE,
    GOOD,
    TORCHRUN,
    Ancestor,
    Plan,
    changed,
    check_report,
    launched,
    message,
    missing,
    write,
)

from samecurve.strategy.launchers import _accelerate_flags
from samecurve.strategy.resolve import strategy_path

A = ACCELERATE
ONE = {key: value for key, value in A.items() if key not in TORCHRUN}  # accelerate launch without torchrun below it

# name, changed files, command line, environment, ancestors, the report's rows (see report_cases.py), and the exit
# code where it is not 2
# fmt: off
CASES = [
    ("unseen config", {}, ["r.yaml"], A, None,
     [("environment", "ACCELERATE_MIXED_PRECISION", "config file", "--strategy FILE")]),
    ("use flag", {}, ["r.yaml"], {**A, "ACCELERATE_USE_FSDP": "true"}, launched("--use_fsdp", "train.py"),
     [("command line", "--use_fsdp", "accelerate launch", "strategy", "remove the flag"),
      ("environment", "ACCELERATE_USE_FSDP", "--strategy FILE", "--config_file FILE"),
      ("environment", "WORLD_SIZE", "2", "--strategy configs/ddp.yaml")]),
    ("two files", {}, ["r.yaml", "--strategy", "configs/fsdp.yaml"], A, launched("--config_file", "configs/ddp.yaml", "train.py"),
     [("command line", "--strategy", "configs/fsdp.yaml", "configs/ddp.yaml", "--strategy")]),
    ("precision flag", {}, ["r.yaml"], {**A, "ACCELERATE_MIXED_PRECISION": "fp16"}, launched("--mixed-precision=fp16", "--config-file=configs/ddp.yaml", "train.py"),
     [("command line", "--mixed_precision", "accelerate launch", "precision", "remove the flag")]),
    ("precision variable", {}, ["r.yaml", "--strategy", "configs/ddp.yaml"], {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "fp16"}, None,
     [("environment", "ACCELERATE_MIXED_PRECISION", "fp16", "precision", "unset")]),
    ("precision in the file", changed("configs/ddp.yaml", "num_processes: 2", "num_processes: 2\nmixed_precision: fp16"), ["r.yaml"], {**A, "ACCELERATE_MIXED_PRECISION": "fp16"}, launched("--config_file", "configs/ddp.yaml", "train.py"),
     [("configs/ddp.yaml:3", "mixed_precision", "fp16", "precision", '"bf16"', "r.yaml:3", "remove")]),
    ("cpu", {}, ["r.yaml"], {**ONE, "ACCELERATE_USE_CPU": "True"}, None,
     [("environment", "ACCELERATE_MIXED_PRECISION", "config file", "--strategy FILE"),
      ("environment", "ACCELERATE_USE_CPU", "True", "FSDP and DeepSpeed", "unset")]),
    ("cpu flag", {}, ["r.yaml", "--strategy", "configs/single.yaml"], {**ONE, "ACCELERATE_USE_CPU": "True"}, launched("--cpu", "train.py"),
     [("command line", "--cpu", "accelerate launch", "FSDP and DeepSpeed", "remove the flag")]),
    ("stage var", {}, ["r.yaml", "--strategy", "configs/zero2.yaml"], {**TORCHRUN, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, None,
     [("environment", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "DeepSpeed JSON", "unset")]),
    ("owned flags", {}, ["r.yaml"], A, launched("--config_file", "configs/zero2.yaml", "--zero_stage", "3", "--fsdp_offload_params", "true", "--num_machines", "1", "train.py", "--not_ours"),
     [("command line", "--fsdp_offload_params", "accelerate launch", "strategy", "remove the flag"),
      ("command line", "--zero_stage", "accelerate launch", "DeepSpeed JSON", "remove the flag")]),
    ("dynamo", {}, ["r.yaml", "--strategy", "configs/ddp.yaml"], {**A, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, None,
     [("environment", "ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "compile", "unset")]),
    ("not started", {}, ["r.yaml"], ONE, launched("--config_file", "configs/ddp.yaml", "train.py"),
     [("environment", "WORLD_SIZE", "1", "configs/ddp.yaml:2", "num_processes: 2", "equal")], 6),
    ("more asked", {}, ["r.yaml"], ONE, launched("--config_file", "configs/single.yaml", "--num_processes", "4", "train.py"),
     [("environment", "WORLD_SIZE", "1", "--num_processes 4", "another strategy")], 6),
    ("found missing", {}, ["r.yaml"], A, launched("--config_file", "configs/none.yaml", "train.py"),
     [("configs/none.yaml", "", "No such file or directory", "(configs/none.yaml)")]),
]
# fmt: on


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_report(case, folder):
    _, files, argv, environ, ancestors, rows, *code = case
    write(folder, files)
    report, found_code = message(folder, argv, environ, ancestors)
    check_report(report, rows)
    assert [found_code] == (code or [2])


def strategy(folder, argv, environ, ancestors=None):
    plan = message(folder, ["r.yaml", *argv], environ, ancestors)
    assert isinstance(plan, Plan), plan
    return plan.strategy


def test_plain_python_is_single(folder):
    found = strategy(folder, [], {})
    assert (found.name, found.family, found.launcher, found.world_size) == ("single", "single", "python", 1)
    assert (found.path, found.accelerate, found.deepspeed_path, found.deepspeed) == (None, {}, None, None)


@pytest.mark.parametrize(
    ("file", "environ", "argv", "launcher"),
    [
        ("configs/zero2.yaml", TORCHRUN, [], "torchrun"),
        ("configs/zero2.yaml", {"RANK": "0", "WORLD_SIZE": "2"}, ["--local_rank=0"], "deepspeed"),
        ("configs/zero2.yaml", {"RANK": "0", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}, [], "deepspeed"),
        ("configs/zero2.yaml", {"RANK": "0", "WORLD_SIZE": "2"}, [], "python"),
        ("configs/zero2.yaml", A, [], "accelerate"),
    ],
)
def test_same_strategy_under_every_launcher(folder, file, environ, argv, launcher):
    found = strategy(folder, [*argv, "--strategy", file], environ)
    assert found.launcher == launcher
    assert (found.name, found.family, found.zero_stage, found.dims.dp) == ("zero2", "zero", 2, 2)
    assert (found.path, found.deepspeed_path) == (Path(file), Path("ds_configs/zero2.json"))
    assert found.deepspeed["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5e8}
    assert found.accelerate["num_processes"] == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--config_file", "configs/ddp.yaml", "train.py", "r.yaml"),
        ("--config-file=configs/ddp.yaml", "--num_processes=2", "train.py"),
        ("--num-processes", "2", "--config-file", "configs/ddp.yaml", "train.py", "--config_file", "configs/fsdp.yaml"),
    ],
)
def test_the_file_of_accelerate_launch_is_found(folder, words):
    found = strategy(folder, [], A, launched(*words))
    assert (found.name, found.family, found.path) == ("ddp", "ddp", Path("configs/ddp.yaml"))


def test_accelerate_launch_in_its_other_forms(folder):
    for start in (("accelerate-launch",), ("python", "-m", "accelerate.commands.launch")):
        ancestors = [Ancestor((*start, "--config_file", "configs/ddp.yaml", "train.py"), str(folder))]
        assert strategy(folder, [], A, lambda ancestors=ancestors: ancestors).name == "ddp"
    module = ("accelerate", "launch", "--num_processes", "2", "-m", "samecurve.train", "r.yaml", "--strategy", "ddp")
    assert set(_accelerate_flags([Ancestor(module, "/")])[0]) == {"num_processes", "m"}  # --strategy is train.py's own


def test_a_folder_named_accelerate_is_no_launcher():
    assert _accelerate_flags([Ancestor(("/srv/accelerate/tool", "launch", "--cpu"), "/")])[0] is None
    assert _accelerate_flags([Ancestor(("/srv/bin/accelerate", "launch", "--cpu"), "/")])[0] == {"cpu": ""}


def test_a_config_file_is_relative_to_the_launcher(folder, monkeypatch):
    (folder / "below").mkdir()
    ancestors = launched("--config_file", "configs/ddp.yaml", "train.py", directory=str(folder))
    monkeypatch.chdir(folder / "below")
    write(folder / "below", {})
    assert strategy(folder, [], A, ancestors).path == folder / "configs/ddp.yaml"


def test_the_same_file_twice_is_one_choice(folder):
    ancestors = launched("--config_file", "./configs/ddp.yaml", "train.py")
    assert strategy(folder, ["--strategy", "configs/ddp.yaml"], A, ancestors).name == "ddp"


def test_default_config_of_accelerate(folder):
    environ = {**A, "HF_HOME": str(folder / "cache")}
    write(folder, {"cache/accelerate/default_config.yaml": GOOD["configs/ddp.yaml"]})
    found = strategy(folder, [], environ, launched("train.py"))
    assert (found.name, found.family) == ("default_config", "ddp")


def test_accelerate_launch_without_any_file_is_single(folder):
    environ = {**ONE, "HF_HOME": str(folder / "nothing")}
    assert strategy(folder, [], environ, launched("train.py")).family == "single"


def test_the_launchers_number_wins_over_the_file(folder):
    four = {"WORLD_SIZE": "4"}
    assert strategy(folder, ["--strategy", "configs/ddp.yaml"], {**TORCHRUN, **four}).world_size == 4
    ancestors = launched("--config_file", "configs/ddp.yaml", "--num_processes", "4", "train.py")
    assert strategy(folder, [], {**A, **four}, ancestors).world_size == 4


def test_plain_python_may_run_any_strategy_alone(folder):
    write(folder, changed("configs/ddp.yaml", "num_processes: 2\n", ""))
    assert strategy(folder, ["--strategy", "configs/ddp.yaml"], {}).world_size == 1


def test_pipeline_hsdp_and_offload(folder):
    four = {**TORCHRUN, "WORLD_SIZE": "4"}
    pipeline = strategy(folder, ["--strategy", "ds_configs/pipeline.json"], four)
    assert (pipeline.family, pipeline.dims.pp, pipeline.dims.dp) == ("pipeline", 2, 2)
    assert (pipeline.name, pipeline.path, pipeline.zero_stage) == ("pipeline", None, 1)
    assert strategy(folder, ["--strategy", "configs/hsdp.yaml"], four).replicate_size == 2
    nvme = strategy(folder, ["--strategy", "ds_configs/zero3_nvme.json"], four)
    assert (nvme.zero_stage, nvme.offload) == (3, ("optimizer:nvme", "param:cpu"))
    files = changed("configs/fsdp.yaml", "  fsdp_version", "  fsdp_offload_params: true\n  fsdp_version")
    write(folder, {"configs/fsdp_offload.yaml": files["configs/fsdp.yaml"]})
    fsdp = strategy(folder, ["--strategy", "configs/fsdp_offload.yaml"], four)
    assert (fsdp.family, fsdp.offload) == ("fsdp", ("optimizer:cpu", "param:cpu"))


def test_layers_of_a_local_model_folder(folder):
    model = {"model/config.json": '{"n_layer": 1}'}
    write(folder, model | changed("r.yaml", "config: {model_type: llama, num_hidden_layers: 4}", "path: ./model"))
    report, _ = message(folder, ["r.yaml", "--strategy", "ds_configs/pipeline.json"], TORCHRUN)
    assert report.splitlines()[1].startswith("  ds_configs/pipeline.json:4: pipeline.stages: found 2")
    assert missing(report.splitlines()[1], ["2", "1"]) == []


HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "datasets")


def test_a_mistake_is_told_before_torch_is_loaded(folder):
    script = f"""
import os, sys
from samecurve.strategy.resolve import resolve_plan
from samecurve.errors import ConfigurationError
try:
    resolve_plan(["r.yaml", "steps=two", "--strategy", "configs/zero2.yaml"], {{**os.environ, **{A!r}}})
except ConfigurationError as error:
    print([name for name in {HEAVY!r} if name in sys.modules], error.exit_code)
"""
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": str(root)}
    )
    assert shown.stdout == "[] 2\n", shown.stderr


def test_help_needs_no_torch(folder):
    script = f"import sys; from samecurve.strategy.resolve import resolve_plan\ntry: resolve_plan(['--help'], {{}})\nexcept SystemExit as e: print([name for name in {HEAVY!r} if name in sys.modules], e.code)"
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": str(root)}
    )
    assert "RECIPE [key.path=value ...]" in shown.stdout
    assert shown.stdout.endswith("[] 0\n"), shown.stderr


def test_the_plan_carries_what_was_typed(folder):
    options = ["--local_rank=0", "seed=1", "--strategy", "configs/ddp.yaml", "--resume", "none", "steps=9"]
    plan = message(folder, ["r.yaml", *options], {"RANK": "0", "WORLD_SIZE": "2"})
    assert (plan.recipe_path, plan.overrides, plan.resume) == ("r.yaml", ("seed=1", "steps=9"), "none")


@pytest.mark.parametrize(
    ("name", "step"), [("best", 20), ("step_00000040", 40), ("runs/x/checkpoints/step_00000040", 40)]
)
def test_a_checkpoint_is_named(name, step, folder):
    inside = folder / "runs" / "x" / "checkpoints"
    for number in (20, 40):
        (inside / f"step_{number:08d}").mkdir(parents=True)
    (inside / "best.json").write_text('{"checkpoint": "step_00000020", "eval_loss": 1.0}')
    plan = message(folder, ["r.yaml", "--resume", name], {})
    assert Path(plan.resume).resolve() == (inside / f"step_{step:08d}").resolve()


def test_a_strategy_is_a_name_or_a_file(folder):
    """Where the working folder has no such file, the name is one of this clone's; an own file wins."""
    assert message(folder, ["r.yaml", "--strategy", "ddp"], {"RANK": "0", "WORLD_SIZE": "2"}).strategy.name == "ddp"
    assert strategy_path("ddp") == "configs/ddp.yaml" and strategy_path("no_such") == "no_such"
    assert strategy_path("tp") == str(Path(__file__).resolve().parents[2] / "configs" / "tp.yaml")
    Path("ddp").write_text("an own file")
    assert strategy_path("ddp") == "ddp" and strategy_path("own/ddp") == "own/ddp"


def test_the_command_line_is_declared_once():
    """A second parser of train.py's options would end every run that uses an option which it does not know."""
    package = Path(__file__).resolve().parents[2] / "samecurve"
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    assert [name for name, text in texts.items() if '"--fresh"' in text and "add_argument" in text] == [
        "strategy/resolve.py"
    ]
