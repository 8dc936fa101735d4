"""The scripts of `plan --output` really train: one step on two CPU processes, the same under every launcher."""

from __future__ import annotations

import shlex

import pytest
import yaml
from harness import BIN, ROOT, Run
from test_equal_curves import ENGINES

from samecurve.cli.commands import main
from samecurve.distributed.network import free_port
from samecurve.launch.hosts import PORT
from samecurve.launch.target import CLONE, LAUNCHERS

SETTINGS = ("steps=1", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.full
def test_every_launcher_trains_one_step(workspace, tmp_path):
    _emit(workspace, tmp_path, "zero2", 2)
    runs = {launcher: _started(workspace, tmp_path, launcher) for launcher in LAUNCHERS}
    assert {run.facts["zero_stage"] for run in runs.values()} == {2}
    losses = {launcher: run.column("loss") for launcher, run in runs.items()}
    assert len({tuple(each) for each in losses.values()}) == 1, losses


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("zero3", 2), ("pipeline", 2)])
def test_what_is_emitted_of_every_strategy_trains_the_same_step(strategy, world, workspace, tmp_path):
    """One step, as the single process of the reference."""
    _emit(workspace, tmp_path, strategy, world)
    found = _started(workspace, tmp_path, "torchrun")
    expected = workspace.run(None, 1, *SETTINGS, "export.enabled=false", "batch.micro_batch_size=8")
    assert (found.facts["world_size"], found.facts["engine"]) == (world, ENGINES[strategy])
    assert found.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert found.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)


def _emit(workspace, folder, strategy: str, world: int) -> None:
    command = ["plan", str(workspace.recipe), "--cluster", f"h100x{world}", "--output", str(folder)]
    assert main([*command, "--strategy", f"configs/{strategy}.yaml", *SETTINGS, "export.enabled=false"]) == 0


def _started(workspace, folder, launcher: str) -> Run:
    """Run a script as it was emitted, on a port of its own; of Kubernetes the command, without its names."""
    directory, port = folder / f"run_{launcher}", str(free_port())
    name = f"{launcher}.{'yaml' if launcher in ('kubernetes', 'trainjob') else 'sh'}"
    text = (folder / name).read_text().replace(str(PORT), port)
    if launcher == "trainjob":
        words = yaml.safe_load(text.replace(CLONE, str(ROOT)))["spec"]["trainer"]["command"]
        text = f'exec {shlex.join(words)} "$@"\n'
    if launcher == "kubernetes":
        _, job = yaml.safe_load_all(text)
        words = job["spec"]["template"]["spec"]["containers"][0]["command"]
        local = {"--node_rank=$(JOB_COMPLETION_INDEX)": "--node_rank=0"}
        local["--master_addr=samecurve-0.samecurve"] = "--master_addr=127.0.0.1"
        text = f'exec {shlex.join(local.get(word) or word for word in words)} "$@"\n'
    script = folder / f"local_{launcher}.sh"
    script.write_text(text)
    given = _operator(port) if launcher == "trainjob" else {}
    run = workspace.execute(["bash", str(script), f"output_dir={directory}"], directory, **_slurm(folder), **given)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == "strategy" and len(run.metrics) == 1
    return run


def _operator(port: str) -> dict[str, str]:
    """The variables that Kubeflow Trainer's torch plugin sets (pkg/runtime/framework/plugins/torch/torch.go)."""
    sizes = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    return sizes | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}


SRUN = """#!/bin/sh
# stands in for srun with two tasks on this machine
shift
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait "$task" || code=$?; done
exit "${code:-0}"
"""


def _slurm(folder) -> dict[str, str]:
    """SLURM's variables and stand-ins for its two commands; test_slurm.py has the real ones."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": str(free_port() % 20000)}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    return job | step | {"PATH": f"{tools}:{BIN}:/usr/bin:/bin"}
