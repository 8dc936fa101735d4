"""The scripts that `plan --emit` writes really train: one step on two CPU processes, the same under every launcher."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from harness import BIN, ROOT, free_port

from samecurve.cli.commands import main
from samecurve.strategy.launch_files import LAUNCHERS, PORT


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero2"])
def test_every_launcher_trains_one_step(strategy, workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "plan"
    command = ["plan", str(workspace.recipe), "--cluster", "h100x2", "--emit", str(folder)]
    settings = ["steps=1", "schedule.warmup_steps=0", "evaluate.every_steps=0", "checkpoint.every_steps=0"]
    assert main([*command, "--strategy", f"configs/{strategy}.yaml", *settings, "export.enabled=false"]) == 0
    losses = {launcher: _first_loss(workspace, folder, launcher, strategy) for launcher in LAUNCHERS}
    assert len(set(losses.values())) == 1, losses


def _first_loss(workspace, folder, launcher: str, strategy: str) -> float:
    directory, port = folder / f"run_{launcher}", str(free_port())
    name = "kubernetes.yaml" if launcher == "kubernetes" else f"{launcher}.sh"
    text = (folder / name).read_text().replace(str(PORT), port)
    if launcher == "kubernetes":
        _, job = yaml.safe_load_all(text)
        words = job["spec"]["template"]["spec"]["containers"][0]["command"]
        local = {"--node_rank=$(JOB_COMPLETION_INDEX)": "--node_rank=0"}
        local["--master_addr=samecurve-0.samecurve"] = "--master_addr=127.0.0.1"
        text = f'exec {shlex.join(local.get(word) or word for word in words)} "$@"\n'
    script = folder / f"local_{launcher}.sh"
    script.write_text(text)
    slurm = _slurm(folder)
    run = workspace.execute(["bash", str(script), f"output_dir={directory}"], directory, **slurm)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == "strategy" and run.facts["zero_stage"] == int(strategy[-1])
    assert run.facts["world_size"] == 2 and len(run.metrics) == 1
    return run.metrics[0]["loss"]


def _slurm(folder) -> dict[str, str]:
    """SLURM's variables and stand-ins for its two commands."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, body in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(free_port() % 20000)}
    return job | {"PATH": f"{tools}:{BIN}:/usr/bin:/bin"}


def test_plan_json_names_what_was_planned(workspace, tmp_path, monkeypatch):
    """The everyday part: the files for two processes are written and read back."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "plan"
    assert main(["plan", str(workspace.recipe), "--cluster", "h100x2", "--emit", str(folder)]) == 0
    assert json.loads((folder / "plan.json").read_text())["launchers"] == list(LAUNCHERS)
