"""A rehearsal leaves no trace, and names what would fail hours later."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, STEPS, largest_relative_difference

from samecurve.errors import ConfigurationError, SamecurveError, StorageError
from samecurve.strategy import preflight
from samecurve.training import rehearsal

FULL = pytest.mark.full
STAGES = ["start", "first step", "next step", "evaluation", "checkpoint", "export"]
LIMIT_GIB = 1.5
# 2 rows per step and 30 per evaluation: 30 x 4 heads x 1024 x 1024 attention probabilities are 0.5 GB for each copy
LARGE_EVALUATION = [
    *("batch.global_batch_size=2", "batch.sequence_length=1024"),
    *("model.attention=eager", f"memory.limit_gib={LIMIT_GIB}", "schedule.warmup_steps=1"),
]
# of one run and another: what a step computes, without times and memory
COMPUTED = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples", "skipped_steps")


def hashes(run, step: int) -> dict[str, str]:
    """Weights, moments and random generators of every rank, as they are on the disk."""
    files = sorted(run.checkpoint(step).glob("rank_*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def assert_no_trace(run, without) -> None:
    assert run.returncode == 0, run.output
    found = [line.split("  ")[0] for line in run.output.partition("rehearsal  ")[2].splitlines()[1:7]]
    assert found == STAGES and "everything fits" in run.output, run.output
    for key in COMPUTED:
        assert run.column(key) == without.column(key), key
    assert len(hashes(run, STEPS)) == without.facts["world_size"]
    assert hashes(run, STEPS) == hashes(without, STEPS)
    assert not list(run.directory.rglob(f"*{rehearsal.FOLDER}*"))
    assert {path.name for path in run.directory.iterdir()} == {path.name for path in without.directory.iterdir()}


@pytest.mark.parametrize(
    ("strategy", "world"),
    [("fsdp", 2), *(pytest.param(*case, marks=FULL) for case in ((None, 1), ("ddp", 2), ("zero1", 2), ("zero2", 2)))]
    + [pytest.param(*case, marks=FULL) for case in (("zero3", 2), ("hsdp", 4), ("pipeline", 2), ("tp", 2))],
)
def test_a_rehearsal_leaves_no_trace(strategy, world, workspace):
    # the rehearsal's one checkpoint has no evaluation
    best = ("evaluate.every_steps=5", "checkpoint.best=eval_loss", "export.checkpoint=best")
    assert_no_trace(workspace.run(strategy, world, "rehearse=true", *best), workspace.run(strategy, world, *best))


@FULL
@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("zero3", 2)])
def test_a_rehearsal_before_a_resumed_step_leaves_no_trace(strategy, world, workspace):
    before = workspace.run(strategy, world)
    without = workspace.resume(before, 10, strategy, world)
    run = workspace.resume(before, 10, strategy, world, "rehearse=true")
    assert run.facts["start_step"] == 10
    assert_no_trace(run, without)


@FULL
def test_a_rehearsal_keeps_the_day_of_the_run(workspace, tmp_path):
    """A chat template that writes the date would render other rows today."""
    chats = ([{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}] for n in range(60))
    rows = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
    (tmp_path / "chats.jsonl").write_text(rows)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    asks = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + turns + asks)
    keys = ("task=sft", f"data.path={tmp_path / 'chats.jsonl'}", f"tokenizer.chat_template={tmp_path / 'dated.jinja'}")
    keys = (*keys, "batch.sequence_length=64")
    before = workspace.run(None, 1, *keys, "tokenizer.template_date=2024-07-25")
    assert before.returncode == 0, before.output
    run = workspace.resume(before, 10, None, 1, *keys, "rehearse=true")
    assert run.returncode == 0 and "everything fits" in run.output, run.output
    assert run.facts["recipe"]["tokenizer"]["template_date"] == "2024-07-25"


@FULL
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_every_launcher_rehearses(launcher, workspace):
    run = workspace.run("zero2", 2, "rehearse=true", launcher=launcher)
    assert_no_trace(run, workspace.run("zero2", 2))


@pytest.fixture
def planned(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", workspace.environment())
    monkeypatch.chdir(ROOT)

    def plan(*overrides):
        folder = tmp_path / "new" / "run"
        return preflight.plan([str(workspace.recipe), f"output_dir={folder}", *overrides], os.environ)

    yield plan
    assert not (tmp_path / "new").exists()


def failure(plan) -> SamecurveError:
    with pytest.raises(SamecurveError) as caught:
        rehearsal.run_stages(plan, [os.environ])  # by default the environment that the import found
    return caught.value


@FULL
def test_an_evaluation_that_is_too_large_is_named(planned):
    error = failure(planned(*LARGE_EVALUATION, "batch.micro_batch_size=64"))
    assert isinstance(error, ConfigurationError)
    assert "evaluation: rank 0 reached" in str(error) and f"memory.limit_gib is {LIMIT_GIB}" in str(error)
    assert "lower batch.micro_batch_size (found 64)" in str(error)


@FULL
def test_an_evaluation_within_the_limit_passes(planned):
    stages = rehearsal.run_stages(planned(*LARGE_EVALUATION, "batch.micro_batch_size=2"))
    assert [stage.name for stage in stages or []] == STAGES


@FULL
@pytest.mark.parametrize(
    ("fault", "stage", "reason"),
    [
        ("save.fsync@*:0:enospc", "checkpoint", "ENOSPC"),
        ("export.write@*:0:eacces", "export", "EACCES"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(fault, stage, reason, planned, monkeypatch):
    monkeypatch.setitem(os.environ, "SAMECURVE_FAULTS", fault)
    error = failure(planned())
    assert isinstance(error, StorageError)
    assert f"rehearsal: {stage}: " in str(error) and reason in str(error) and "output_dir" in str(error)


def test_auto_needs_a_limit_without_a_gpu(planned):
    with pytest.raises(ConfigurationError, match=r"batch.micro_batch_size: found auto, .*memory.limit_gib"):
        planned("batch.micro_batch_size=auto")


@FULL
def test_auto_takes_what_fits_and_keeps_the_curve(workspace):
    """8 rows per rank: all at once would take 1.5 GiB more than one."""
    common = [*LARGE_EVALUATION[1:], "batch.global_batch_size=16", "steps=3", "evaluate.every_steps=0"]
    run = workspace.run("fsdp", 2, *common, "batch.micro_batch_size=auto")
    assert run.returncode == 0, run.output
    tried = dict(re.findall(r"batch.micro_batch_size (\d+) (fits|does not fit)", run.output))
    size = run.facts["recipe"]["batch"]["micro_batch_size"]
    fitting = [int(each) for each, outcome in tried.items() if outcome == "fits"]
    assert size == max(fitting) and size < 8 and len(fitting) < len(tried)
    assert max(run.column("peak_memory_gib")) < LIMIT_GIB
    reference = workspace.run(None, 1, *common, "batch.micro_batch_size=1")
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert largest_relative_difference(run.column(key), reference.column(key)) < tolerance, key


@FULL
@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]])
def test_the_command_rehearses_and_leaves_nothing(start, workspace, tmp_path):
    def command(limit: str):
        arguments = [*start, "-m", "samecurve", "rehearse", str(workspace.recipe), f"output_dir={tmp_path / 'run'}"]
        arguments += ["--strategy", "configs/zero2.yaml", "batch.micro_batch_size=auto", limit]
        env = workspace.environment(CUDA_VISIBLE_DEVICES="")
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)

    done = command("memory.limit_gib=100")
    assert done.returncode == 0, done.stderr
    assert "everything fits" in done.stdout and "the largest that fits: batch.micro_batch_size=4" in done.stdout
    done = command("memory.limit_gib=0.1")
    assert done.returncode == (1 if start else ConfigurationError.exit_code), done.stderr  # torchrun's own code is 1
    assert "memory.limit_gib is 0.1" in done.stderr
    assert not (tmp_path / "run").exists()


@FULL
def test_a_stop_ends_the_rehearsal_and_the_next_start_removes_it(workspace, tmp_path):
    command = [sys.executable, "train.py", str(workspace.recipe), f"output_dir={tmp_path / 'run'}", "rehearse=true"]
    command += ["steps=6"]
    folder, env = tmp_path / "run" / rehearsal.FOLDER, workspace.environment()
    with subprocess.Popen(command, cwd=ROOT, env=env) as process:
        while not (folder / "heartbeats").exists():
            assert process.poll() is None
            time.sleep(0.05)
        (pid,) = [int(line) for line in children(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}") and folder.exists()
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == 0
    assert not folder.exists()


def children(pid: int) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
