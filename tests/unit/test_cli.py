import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat_templates import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM

from samecurve.bench import jobs
from samecurve.bench.jobs import Outcome, StrategyJob
from samecurve.cli import commands, compare, summary
from samecurve.config import loader, rules_training
from samecurve.errors import ConfigurationError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import folders
from samecurve.run.run_directory import RunDirectory
from samecurve.storage.jsonl import JsonlFile
from samecurve.strategy.resolve import command_line

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
output_dir: runs/x
steps: 100
model:
  config: {model_type: llama, num_hidden_layers: 2}
tokenizer: {vocabulary_size: 300}
data: {path: "builtin:python-stdlib"}
batch: {global_batch_size: 8, sequence_length: 16}
optimizer: {learning_rate: 1e-3}
schedule: {warmup_steps: 40}
"""


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(RECIPE)
    return str(file)


@pytest.fixture
def strategies(tmp_path, monkeypatch):
    """A configs/ folder in the working directory."""
    files = {
        "configs/single.yaml": "distributed_type: 'NO'\n",
        "configs/ddp.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
        "configs/hsdp.yaml": "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n",
        "configs/pipeline.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: p.json\n",
        "p.json": json.dumps({"pipeline": {"stages": 2}}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


# the front door


def test_help_and_errors_need_no_torch(tmp_path):
    code = (
        "import sys\nfrom samecurve.cli import commands as cli\n"
        f"assert cli.main(['summary', {str(tmp_path)!r}]) == 2\n"
        "import importlib\n"
        "for name in [*cli.COMMANDS, *(f'bench.{name}' for name in cli.BENCH_COMMANDS)]:\n"
        "    importlib.import_module(f'samecurve.cli.{name}')\n"
        "assert not {'torch', 'transformers', 'accelerate'} & sys.modules.keys()\n"
        "cli.main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in commands.COMMANDS)
    assert done.stderr.startswith(f"{tmp_path}: ") and done.stderr.count("\n") == 1
    assert "run.json" in done.stderr and "metrics.jsonl" in done.stderr


@pytest.mark.parametrize("program", [["-m", "samecurve"], ["train.py", "recipes/quickstart.yaml"]])
@pytest.mark.parametrize("is_made", [True, False])
def test_another_python_is_told_in_one_line(is_made, program, tmp_path):
    """Without site-packages, as in a terminal in which .venv is not active."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "samecurve", clone / "samecurve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", clone)
    activate = clone / ".venv" / "bin" / "activate"
    if is_made:
        activate.parent.mkdir(parents=True)
        activate.touch()
    done = subprocess.run([sys.executable, "-S", *program], cwd=clone, capture_output=True, text=True)
    fix = f"source '{activate}'" if is_made else f"cd '{clone}'; bash scripts/quickstart.sh, which makes .venv"
    assert re.fullmatch(rf"[^\n]+ has no torch, transformers, .*, psutil, .*yaml; first: {fix}\n", done.stderr)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare r.yaml --num_processes 0", "--num_processes: found 0, but it must be at least 1"),
        ("bench step r.yaml --num_processes 0", "--num_processes: found 0, but it must be at least 1"),
        ("bench collectives --num_processes 0", "--num_processes: found 0, but it must be at least 1"),
        ("bench matmul --seconds nan", "--seconds: found nan, but it must be a number above 0"),
        (
            "bench dataloader recipes/quickstart.yaml --seconds 0",
            "--seconds: found 0.0, but it must be a number above 0",
        ),
    ],
)
def test_a_number_that_means_nothing_is_refused(command, message, capsys):
    """Instead of the default in its place, or of a measurement of no time."""
    assert commands.main(command.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report {}", "generate {} --prompt a", "summary {}", "export x --output {}"])
def test_a_path_that_cannot_be_is_refused(command, capsys):
    assert commands.main(command.format("a" * 300).split()) == 2
    assert "a name in it has 300 bytes and file systems take 255" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "inspect", "evaluate", "bench step", "bench dataloader"])
def test_only_what_is_needed_is_called_required(command, capsys):
    with pytest.raises(SystemExit):
        commands.main(command.split())
    assert re.search(r"arguments are required: [A-Z]+\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plna r.yaml", "no command plna; did you mean plan?"),
        ("train r.yaml", "no command train; python train.py RECIPE trains"),
        ("x", "no command x; the commands are inspect, compare, "),
        ("bench matmull", "no command matmull; did you mean matmul?"),
        ("plan r.yaml --cluster h100x8 --dry-run", "--dry-run; did you mean --dry_run?"),
        ("compare r.yaml --processes 2", "--processes 2; did you mean --num_processes?"),
        ("compare r.yaml --num_proc 2", "--num_proc 2; did you mean --num_processes?"),
        ("compare r.yaml --xyz", "unrecognized arguments: --xyz\n"),
    ],
)
def test_a_misspelt_command_or_option_names_the_nearest(command, message, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(command.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_an_option_means_the_same_in_every_command():
    parsers = {"train.py": command_line()}
    for name in [*commands.COMMANDS, *(f"bench.{name}" for name in commands.BENCH_COMMANDS)]:
        module = importlib.import_module(f"samecurve.cli.{name}")
        if not hasattr(module, "__path__"):
            parsers[name] = argparse.ArgumentParser()
            module.add_arguments(parsers[name])
    values = defaultdict(dict)
    for name, parser in parsers.items():
        for action in parser._actions:
            for option in action.option_strings:
                kind = "flag" if action.nargs == 0 else action.metavar or ("choice" if action.choices else "number")
                values[option].setdefault(kind, name)
    assert (
        len(parsers) == len(commands.COMMANDS) + len(commands.BENCH_COMMANDS)
        and {"--strategy", "--json"} <= values.keys()
    )
    assert [option for option in values if not re.fullmatch("-h|--[a-z_]+", option)] == []
    del values["--output"]  # what a command writes, a file or a folder
    assert {option: kinds for option, kinds in values.items() if len(kinds) > 1} == {}


def test_another_working_directory_is_refused(tmp_path, monkeypatch, recipe_file, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["--strategy", "ddp", "--launcher", "torchrun", "--nodes", "1", "--gpus_per_node", "2"]
    assert commands.main(["launch", recipe_file, *asked]) == ConfigurationError.exit_code
    root = Path(commands.__file__).parents[2]
    told = capsys.readouterr().err
    assert told.startswith(str(root)) or f"cd {root}" in told


# compare: which jobs


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (1, {"single": 1, "ddp": 1, "hsdp": 4, "pipeline": 2}),
        (2, {"single": 1, "ddp": 2, "hsdp": 4, "pipeline": 2}),
        (5, {"single": 1, "ddp": 5, "hsdp": 6, "pipeline": 6}),
    ],
)
def test_every_strategy_gets_processes_that_make_sense(strategies, asked, expected):
    assert {job.name: job.world_size for job in jobs.jobs([], asked)} == expected
    assert jobs.jobs([], asked)[0].name == "single"


def test_unknown_strategy(strategies):
    with pytest.raises(ConfigurationError, match="strategy ddpp: no such file; did you mean configs/ddp.yaml"):
        jobs.jobs(["ddp", "ddpp"], 2)
    with pytest.raises(ConfigurationError, match="strategy ddp: given 2 times; keep one"):
        jobs.jobs(["ddp", "configs/ddp.yaml"], 2)


def test_commands():
    train = str(Path(commands.__file__).parents[2] / "train.py")
    single = jobs.command(StrategyJob("single", None, 1), "r.yaml", ["steps=3"], Path("out"))
    assert single == [sys.executable, train, "r.yaml", "steps=3", "output_dir=out", "checkpoint.mirror=null"]
    ddp = jobs.command(StrategyJob("ddp", Path("configs/ddp.yaml"), 2), "r.yaml", [], Path("out"))
    assert ddp[1:] == [
        *(train, "r.yaml", "--strategy", "configs/ddp.yaml", "--num_processes", "2"),
        *("output_dir=out", "checkpoint.mirror=null"),
    ]


@pytest.mark.parametrize(("world_size", "threads"), [(1, "6"), (4, "1"), (8, "1")])
def test_a_process_has_its_share_of_the_cores_that_may_be_used(world_size, threads, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    tell = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    with open(tmp_path / "log", "w") as stream, jobs.processes(tell, stream, world_size) as process:
        assert process.wait() == 0
    assert (tmp_path / "log").read_text() == f"{threads}\n"


def test_a_short_job_has_a_short_warmup(recipe_file):
    expected = ["seed=3", "precision=fp32", "checkpoint.best=null", "evaluate.patience=null", "export.checkpoint=last"]
    expected += ["schedule.warmup_steps=5", "schedule.decay_steps=null"]
    expected += ["evaluate.every_steps=0", "checkpoint.every_steps=0", "numerics.rollback_ratio=null"]
    expected += ["export.verify=off", "profile.steps=null", "steps=20"]
    assert jobs.shortened(recipe_file, ["seed=3"], 20, precision="fp32") == expected
    found = jobs.shortened(recipe_file, ["precision=bf16"], 20, precision="fp32")
    assert found[0] == "precision=bf16" and "precision=fp32" not in found


def test_what_a_short_job_has_no_room_for_is_off(tmp_path):
    """A recipe that is right for its own steps; nobody has said anything wrong."""
    file = tmp_path / "long.yaml"
    more = "numerics: {rollback_ratio: 3}\nprofile: {steps: [40, 42]}\n"
    file.write_text(RECIPE.replace("{warmup_steps: 40}", "{name: wsd, warmup_steps: 40, decay_steps: 40}") + more)
    assert loader.load_recipe(str(file)).profile.steps == (40, 42)
    short = loader.load_recipe(str(file), jobs.shortened(str(file), [], 20))
    assert (short.numerics.rollback_ratio, short.profile.steps, short.schedule.decay_steps) == (None, None, 5)
    asked = loader.load_recipe(str(file), jobs.shortened(str(file), ["profile.steps=[3, 4]"], 20))
    assert asked.profile.steps == (3, 4)
    best = ["evaluate={every_steps: 20, patience: 3}", "data.validation_fraction=0.1", "checkpoint.every_steps=20"]
    best += ["checkpoint.best=eval_loss", "export.checkpoint=best"]
    assert loader.load_recipe(str(file), best).export.checkpoint == "best"
    file.write_text(file.read_text() + "evaluate: {patience: 3}\n")
    short = loader.load_recipe(str(file), jobs.shortened(str(file), best, 20))
    assert (short.checkpoint.best, short.evaluate.patience, short.export.checkpoint) == (None, None, "last")


@pytest.mark.parametrize(("given", "steps"), [(["sede=3"], 20), ([], 0)])
def test_a_wrong_recipe_starts_no_process(recipe_file, given, steps):
    with pytest.raises(ConfigurationError, match="1 problem in the configuration"):
        jobs.shortened(recipe_file, given, steps)


@pytest.mark.parametrize(
    ("more", "given", "precision", "tolerance"),
    [
        ("precision: fp16", [], "fp32", 1e-5),
        ("", ["precision=bf16"], "bf16", 1e-2),
        ("", ["optimizer.name=adamw_bf16"], "bf16", 1e-2),
        ("fp8: tensorwise", [], "bf16", 1e-2),
        ("precision: fp16", ["model.attention=flash_attention_2"], "fp16", 2e-3),
    ],
)
def test_what_is_compared_in_which_precision(more, given, precision, tolerance, tmp_path, monkeypatch, capsys):
    """fp32, but where the recipe cannot be computed in it; its rounding is what strategies may differ by."""
    single = outcome(tmp_path, "single", [6.0, 5.0, 4.0])
    monkeypatch.setattr(jobs, "jobs", lambda *_: [single.job])
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: True))  # torchao is optional
    monkeypatch.setattr(rules_training, "importlib", installed)
    found = []
    monkeypatch.setattr(jobs, "command", lambda job, recipe, settings, output: found.append(settings))
    monkeypatch.setattr(jobs, "run", lambda *_: single)
    file = tmp_path / "tiny.yaml"
    file.write_text(f"{RECIPE}{more}\n")
    assert commands.main(["compare", str(file), *given, "--output", str(tmp_path)]) == 0
    assert loader.load_recipe(str(file), found[0]).precision == precision
    told = (tmp_path / "table.md").read_text()
    assert f"loss within {tolerance:g} and" in told
    assert ("at every step, in " in told) == (precision != "fp32")
    assert commands.main(["compare", str(file), *given, "--output", str(tmp_path), "--tolerance", "1e-7"]) == 0
    assert "loss within 1e-07 and" in capsys.readouterr().out.split("PASS")[-1]


# compare: what a job leaves


def run_job(directory, code):
    return jobs.run(
        StrategyJob("ddp", None, 1), [sys.executable, "-c", code], directory, on_progress=lambda steps: None
    )


def test_a_job_that_works(tmp_path):
    code = (
        "from samecurve.run.run_directory import RunDirectory\n"
        f"run = RunDirectory({str(tmp_path / 'ddp')!r})\n"
        "run.write_run({'engine': 'DDP'}); run.append_metrics({'step': 1}); run.status('done', exit_code=0)\n"
        "print('hello')"
    )
    outcome = run_job(tmp_path / "ddp", code)
    assert (outcome.run, outcome.history.last, outcome.reason) == ({"engine": "DDP"}, {"step": 1}, "")
    assert outcome.log.read_text() == "hello\n"


REPORT = "ConfigurationError (exit code 2)\\n2 problems in the configuration\\n  configs/x.yaml:3: a: wrong\\n  b"
LACKS = "ConfigurationError (exit code 2)\\nthis machine cannot\\n  strategy ddp: no GPU\\n  strategy ddp: no disk\\nW1"
FAILURES = {
    "refused, by torchrun's report": (
        f"import sys; print('{REPORT}\\n[0]:'); print('  exitcode  : 2 (pid: 7)'); sys.exit(1)",
        True,
        "configs/x.yaml:3: a: wrong (and 1 more, see LOG)",
    ),
    "a machine that lacks two things": (
        f"import sys; print('{LACKS}'); print('E1 failed (exitcode: 2)'); print('  exitcode  : 143'); sys.exit(1)",
        True,
        "no GPU (and 1 more, see LOG)",
    ),
    "refused in one line": (
        "import sys; print('ConfigurationError (exit code 2)\\nno GPU'); print('exitcode : 2'); sys.exit(1)",
        True,
        "no GPU",
    ),
    "status.json knows better": (
        "import sys; from samecurve.run.run_directory import RunDirectory; run = RunDirectory(DIRECTORY);"
        "run.status('failed', 'the loss is nan\\nmore', 3, 5); print('exitcode : 2'); sys.exit(1)",
        False,
        "the loss is nan",
    ),
    "crash": ("import os; os.abort()", False, "failed with exit code 1, see LOG"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_job_that_fails_and_an_older_curve(case, tmp_path):
    code, refused, reason = FAILURES[case]
    directory = tmp_path / "ddp"
    old = RunDirectory(directory)
    old.append_metrics({"step": 1})
    old.status("done", exit_code=0)
    old.close()
    outcome = run_job(directory, code.replace("DIRECTORY", repr(str(directory))))
    assert outcome.refused is refused
    assert outcome.reason == reason.replace("LOG", str(tmp_path / "ddp.log"))
    assert outcome.history.num_steps == 0
    assert (directory / "previous" / "1" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, commands.INTERRUPTED)]
)
def test_no_job_outlives_the_comparison(number, code, tmp_path):
    training = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    comparison = (
        "import sys; from pathlib import Path\n"
        "from samecurve.cli import commands as cli, summary; from samecurve.bench import jobs\n"
        f"command, folder = [sys.executable, '-c', {training!r}], Path({str(tmp_path / 'ddp')!r})\n"
        "job = jobs.StrategyJob('ddp', None, 1), command, folder\n"
        "summary.run = lambda _: jobs.run(*job, on_progress=print)\n"
        "sys.exit(cli.main(['summary', '.']))"
    )
    process = subprocess.Popen([sys.executable, "-c", comparison], stdout=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait() == code
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# compare: the verdict


def outcome(folder, name, losses, norms=None, reason="", refused=False, rate=1e-3, skipped=0):
    facts = {
        "tokens": 100,
        "input_tokens": 1000,
        "peak_memory_gib": 1.5,
        "learning_rate": rate,
        "skipped_steps": skipped,
    }
    columns = zip(losses, norms or [1.0] * len(losses), [10.0, 1.0, 3.0], strict=False)
    lines = JsonlFile(folder / name / "metrics.jsonl")
    lines.path.parent.mkdir()
    for step, (loss, norm, seconds) in enumerate(columns, 1):
        lines.append({"step": step, "loss": loss, "grad_norm": norm, "step_seconds": seconds, **facts})
    run = {"engine": "E", "world_size": 2}
    return Outcome(StrategyJob(name, None, 2), run, folder / name, reason, refused, Path("log"))


def test_table_by_hand(tmp_path):
    text, agree = compare.verdict(
        [
            outcome(tmp_path, "single", [6.0, 5.0, 4.0]),
            outcome(tmp_path, "ddp", [6.0, 5.0 * (1 + 2e-6), 4.0]),
            outcome(tmp_path, "nvme", [], reason="no libaio", refused=True),
        ],
        1e-5,
    )
    assert agree
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:4]]
    same = ["E", "2", "6.0000 -> 4.0000"]
    assert table == [
        ["single", *same, "reference", "reference", "50", "1.50", "PASS"],
        ["ddp", *same, "2.0e-06", "0.0e+00", "50", "1.50", "PASS"],
    ]
    assert "PASS: loss within 1e-05 and gradient norm within 0.0001 of single's" in text
    assert "- nvme: cannot run here: no libaio\n" in text


@pytest.mark.parametrize(
    ("others", "agree"),
    [
        ([{"losses": [6.0, 5.0, 4.0]}], True),
        ([{"losses": [6.0, 5.0, 4.0001]}], False),
        ([{"losses": [6.0, 5.0, 4.0], "norms": [1.0, 1.0, 1.0 + 5e-5]}], True),
        ([{"losses": [6.0, 5.0, 4.0], "norms": [1.0, 1.0, 1.0 + 2e-4]}], False),
        ([{"losses": [6.0, 5.0]}], False),
        ([{"losses": [6.0, None, 4.0]}], False),
        ([{"losses": [6.0, 5.0, 4.0]}, {"losses": [], "reason": "crash"}], False),
        ([{"losses": [], "reason": "no GPU", "refused": True}], False),
        ([], True),
    ],
)
def test_agreement(others, agree, tmp_path):
    outcomes = [outcome(tmp_path, f"run {index}", **other) for index, other in enumerate(others)]
    assert compare.verdict([outcome(tmp_path, "single", [6.0, 5.0, 4.0]), *outcomes], 1e-5)[1] is agree


@pytest.mark.parametrize(
    ("norms", "skipped", "agree"),
    [([None, 1.0, 1.0], 1, True), ([None, 1.0, 1.0], 2, False), ([1.0] * 3, 1, False), ([1.0, None, 1.0], 1, False)],
)
def test_a_step_that_the_loss_scale_skips_has_no_norm(norms, skipped, agree, tmp_path):
    """Its gradients exceed the range of fp16, and metrics.jsonl has null."""
    both = [("single", [None, 1.0, 1.0], 1), ("ddp", norms, skipped)]
    outcomes = [outcome(tmp_path, name, [6.0, 5.0, 4.0], norms, skipped=number) for name, norms, number in both]
    assert compare.verdict(outcomes, 2e-3, "fp16")[1] is agree


def test_the_tokens_of_a_task_that_counts_pairs_are_those_read(tmp_path):
    one = outcome(tmp_path, "single", [6.0, 5.0, 4.0])
    one.run["counts"] = "pairs"
    text, _ = compare.verdict([one], 1e-5)
    assert "| 500 " in text and "| 50 " not in text


@pytest.mark.parametrize(
    ("dead", "told"),
    [
        (
            {"losses": [7.6246] * 3, "norms": [1e-37, 1e-30, 1e-20]},
            "has gradient norms of at most 1.0e-20, below",
        ),
        ({"losses": [6.0, 5.0, 4.0], "norms": [0.0] * 3}, "has gradient norms of at most 0.0e+00"),
        (
            {"losses": [6.0, 6.00001, 6.0]},
            "has a loss that changes by 1.7e-06, relative, within the tolerance of 1e-05",
        ),
        ({"losses": [6.0, 5.0, 4.0], "rate": 0.0}, "changed no weight"),
        ({"losses": [6.0, 5.0, 4.0], "skipped": 3}, "changed no weight"),
    ],
)
def test_a_run_in_which_nothing_moves_shows_nothing(dead, told, tmp_path):
    text, agree = compare.verdict([outcome(tmp_path, name, **dead) for name in ("single", "ddp")], 1e-5)
    assert not agree and f"FAIL: single {told}" in text and "PASS |" not in text


def test_nothing_ran(tmp_path):
    text, agree = compare.verdict([outcome(tmp_path, "a", [], reason="no GPU", refused=True)], 1e-5)
    assert (text, agree) == ("- a: cannot run here: no GPU\n", False)


# summary


def finished(directory, recipe_file, strategy_path="configs/ddp.yaml"):
    run = RunDirectory(directory)
    run.write_run(
        {
            "recipe_path": recipe_file,
            "overrides": ["seed=3", "model.config.num_hidden_layers=1", "output_dir=runs/x"],
            "strategy": "ddp",
            "strategy_path": strategy_path,
            "engine": "DistributedDataParallel",
            "world_size": 2,
            "precision": "fp32",
        }
    )
    for step, loss, evaluation in (
        (1, 8.0, {}),
        (2, 6.5, {"eval_loss": 7.0}),
        (3, None, {}),
        (4, 6.0, {"eval_loss": 6.25}),
    ):
        bits = {"eval_bits_per_byte": 2.5} if evaluation else {}
        run.append_metrics({"step": step, "loss": loss, "tokens": 500, "step_seconds": 25.0, **evaluation, **bits})
    run.status("done", step=4, exit_code=0)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    run.close()


def test_summary(tmp_path, recipe_file, capsys):
    directory = tmp_path / "a run"
    finished(directory, recipe_file)
    assert commands.main(["summary", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "state         done",
        "strategy      ddp (DistributedDataParallel), 2 processes, fp32",
        "loss          8.0000 -> 6.0000 in 4 steps",
        "held out      loss 7.0000 -> 6.2500, bits per byte 2.5000 (after step 4)",
        "tokens        2,000 trained in 1:40 min of steps, 20 per second",
        f"run directory {directory}",
    ]
    assert f"  tensorboard --logdir '{directory}/tensorboard'" in lines
    assert f"  python -m samecurve report '{directory}'" in lines
    assert f"  python -m samecurve generate '{directory}'" in lines
    typed = f"{recipe_file} seed=3 model.config.num_hidden_layers=1"
    again = f"accelerate launch --config_file configs/zero3.yaml --num_processes 2 train.py {typed}"
    assert f"  {again} 'output_dir={directory}-zero3'" in lines
    assert f"  python -m samecurve compare {typed} --strategies single,zero3 --num_processes 2" in lines


def test_what_does_not_write_is_asked(tmp_path, recipe_file):
    finished(tmp_path, recipe_file)
    facts = json.loads((tmp_path / "run.json").read_text())
    for task in ("classify", "reward", "embed", "mlm"):
        lines = dict(summary.commands(tmp_path, facts | {"recipe": {"task": task}}))
        assert (
            lines["run the model"].startswith(f"python -m samecurve predict {tmp_path} ")
            and "generate text" not in lines
        )
    assert "--prompt" in dict(summary.commands(tmp_path, facts | {"recipe": {"task": "reward"}}))["run the model"]


def test_the_summary_of_an_adapter_and_of_a_chat(tmp_path, recipe_file):
    finished(tmp_path, recipe_file)
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    facts = json.loads((tmp_path / "run.json").read_text())
    lines = dict(summary.commands(tmp_path, facts | {"recipe": {"task": "sft", "data": {"chat": True}}}))
    assert lines["chat with the model"] == f"python -m samecurve chat {tmp_path}" and "generate text" not in lines
    assert lines["merge the adapter into org/base"] == f"python -m samecurve merge {tmp_path}"
    assert f"model.path={tmp_path / 'merged'}" in lines["start a run from the merged weights"]
    (tmp_path / "merged").mkdir()
    assert "merge the adapter into org/base" not in dict(summary.commands(tmp_path, facts))


def test_the_way_to_go_on_is_legal(tmp_path, recipe_file):
    directory = tmp_path / "run"
    finished(directory, recipe_file)
    typed = ["seed=3", "model.config.num_hidden_layers=1", "tokenizer.vocabulary_size=400", "output_dir=x"]
    overrides = summary.continued(typed, directory)
    keys = ["seed", "model.path", "tokenizer.path", "output_dir"]
    assert [override.partition("=")[0] for override in overrides] == keys
    source = loader.read_recipe(recipe_file, overrides)
    assert source.document.problems == []
    assert (source.recipe.model.path, source.recipe.model.config) == (str(directory / "model"), None)
    assert source.recipe.output_dir == f"{directory}-continued" and source.recipe.seed == 3
    facts = json.loads((directory / "run.json").read_text()) | {"overrides": ["model.new_head=true"]}
    (directory / "model").mkdir(exist_ok=True)
    line = dict(summary.commands(directory, facts | {"recipe": {"model": {"new_head": True}}}))[
        "start a run from its weights"
    ]
    assert line.count("new_head") == 1 and "model.new_head=false" in line  # the export has it


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (None, "python train.py r.yaml"),
        ("configs/ddp.yaml", "accelerate launch --config_file configs/ddp.yaml --num_processes 2 train.py r.yaml"),
        ("ds_configs/z.json", "torchrun --nproc_per_node 2 train.py r.yaml --strategy ds_configs/z.json"),
    ],
)
def test_launch_lines(strategy, line):
    assert summary.launch(strategy, 2, ["r.yaml"]) == line


def test_launch_line_from_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert summary.launch(None, None, ["r.yaml"]) == f"python {shlex.quote(str(ROOT / 'train.py'))} r.yaml"


# generate


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with a random byte-level model."""
    directory = tmp_path_factory.mktemp("run")
    tokenizer = tokenizer_of(None, None, "<eos>", None)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None))
    export(
        ((name, p.detach()) for name, p in model.named_parameters()),
        model,
        ExportTarget(directory / "model", tokenizer),
        True,
    )
    return directory


def written(capsys, *arguments):
    assert commands.main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_generate_marks_the_prompt_and_is_seeded(trained, capsys):
    first = written(capsys, trained, "--prompt", "def f", "--max_new_tokens", 16)
    assert first.startswith(f"{trained / 'model'}, seed 0, temperature 0.5; the prompt is marked\n[def f]")
    assert first == written(capsys, trained / "model", "--prompt", "def f", "--max_new_tokens", 16)
    assert first != written(capsys, trained, "--prompt", "def f", "--max_new_tokens", 16, "--seed", 1)


def test_generate_without_temperature_ignores_the_seed(trained, capsys):
    texts = {
        written(capsys, trained, "--temperature", 0, "--max_new_tokens", 8, "--seed", seed).partition("\n")[2]
        for seed in (0, 1)
    }
    assert len(texts) == 1


def test_generate_needs_a_model(tmp_path):
    with pytest.raises(ConfigurationError, match=rf"{re.escape(str(tmp_path))}.*config.json"):
        folders.model_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "strategy", "note"),
    [
        (["--kind", "sft", "--model_path", "none", "--devices", "8x80"], "ddp", ""),
        (["--model_path", "Qwen/Qwen2.5-7B-Instruct", "--devices", "8x80"], "ddp", ""),  # LoRA: 13 of 80 GiB
        (["--kind", "sft", "--model_path", "Qwen/Qwen2.5-7B-Instruct", "--devices", "8x80"], "fsdp", ""),  # 104 GiB
        (["--model_path", "mistralai/Mixtral-8x7B-v0.1", "--devices", "8x80"], "fsdp", ""),  # 104 GiB, not the 13 of 7B
        (["--kind", "sft", "--model_path", "some/name", "--devices", "2x24"], "fsdp", "size is not known here"),
        (
            ["--model_path", "meta/Llama-70B", "--devices", "2x24"],
            "fsdp",
            "too much for 2 x 24 GiB; use qlora",
        ),
    ],
)
def test_new_chooses_a_strategy_by_memory(options, strategy, note, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.main(["new", "mine", "--yes", *options]) == 0
    output = capsys.readouterr().out
    # quoted in a folder with a space
    assert re.search(rf"train\.py'? mine\.yaml --strategy {strategy} --num_processes", output)
    assert note in output.splitlines()[0]


def test_new_asks_five_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"prompt": "What?", "completion": "That."}\n' * 12)
    asked, answers = [], iter(["sft", "", "my.jsonl", "2x24", "3 epochs"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    assert commands.main(["new", "mine"]) == 0
    assert len(asked) == 5 and asked[0].endswith("sft, token_classify [lora]: ") and asked[1].endswith("[none]: ")
    recipe = loader.load_recipe("mine.yaml")
    assert (recipe.task, recipe.data.path, recipe.epochs, recipe.precision) == ("sft", "my.jsonl", 3, "bf16")
    assert all("#" in line or line.endswith(":") for line in Path("mine.yaml").read_text().splitlines()[2:])
    small = ["data.cache_dir=cache", "data.validation_fraction=0", "tokenizer.vocabulary_size=300"]
    more = ["evaluate.every_steps=0", "batch.global_batch_size=1", "batch.micro_batch_size=1"]
    assert commands.main(["inspect", "mine.yaml", *small, *more]) == 0  # as the printed commands say
    assert "training would refuse" not in capsys.readouterr().out
    for given, problem in ((["mine"], "exists already"), (["x", "--yes", "--data_path", "none.jsonl"], "no such file")):
        assert commands.main(["new", *given]) == 2
        assert problem in capsys.readouterr().err and not Path("x.yaml").exists()
    for option, value in (("kind", "lra"), ("devices", "8"), ("length", "3"), ("model_path", "none")):
        assert commands.main(["new", "x", "--yes", f"--{option}", value]) == 2
        assert capsys.readouterr().err.startswith(f"--{option}: found {value}, ")
