"""What `plan --output` writes: six launchers whose files resolve to one configuration, the one that was planned."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from samecurve.cli.commands import main
from samecurve.errors import TopologyError
from samecurve.launch import scripts
from samecurve.launch.hosts import HostSlots
from samecurve.launch.target import LAUNCHERS, Target, read_back, unnamed
from samecurve.planner import emission, search, strategies
from samecurve.planner.cluster import read_cluster

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {
    "steps": 100,
    "output_dir": "runs/emitted",
    "tokenizer": {"vocabulary_size": 4096},
    "data": {"path": "builtin:python-stdlib"},
    "batch": {"global_batch_size": 64, "micro_batch_size": 1, "sequence_length": 1024},
    "optimizer": {"learning_rate": 1e-3},
}
LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 4096}
LLAMA |= {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}


@pytest.fixture
def recipe(tmp_path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({**RECIPE, "model": {"config": LLAMA}}))
    return str(path)


def started_words(folder: Path, launcher: str, tmp_path: Path) -> list[str]:
    """The words that a script hands to its launcher: it runs, with stand-ins for all that it calls."""
    if launcher == "kubernetes":
        _, job = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
        [container] = job["spec"]["template"]["spec"]["containers"]
        return [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes does
    if launcher == "trainjob":
        trainer = yaml.safe_load((folder / "trainjob.yaml").read_text())["spec"]["trainer"]
        return [word.replace("$$", "$") for word in trainer["command"]]
    stand_ins = {name: f'for word in {name} "$@"; do echo "$word"; done' for name in LAUNCHERS[:3]}
    stand_ins |= {
        "srun": "shift; " + stand_ins["torchrun"].replace("torchrun ", ""),
        "scontrol": "printf 'node7\\nnode8\\n'",
    }
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    variables = {"HEAD": "node7", "RANK": "1", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "3"}
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[7-8]", **variables}
    command = ["bash", folder / f"{launcher}.sh"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.splitlines()


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_all_launchers_start_one_configuration(strategy, recipe, tmp_path, capsys):
    folder = tmp_path / "plan files"
    command = [
        "plan",
        recipe,
        "--cluster",
        "h100x8",
        "--gpus",
        "16",
        "--output",
        str(folder),
        "output_dir=runs/a;$HOME",
    ]
    assert main([*command, "--strategy", f"configs/{strategy}.yaml", "batch.micro_batch_size=2"]) == 0
    assert "written and read back" in capsys.readouterr().out
    target = Target(recipe, str(folder / "strategy.yaml"), (), unnamed(2, 8), folder=str(folder))
    plans = {}
    for launcher in LAUNCHERS:
        words = started_words(folder, launcher, tmp_path)
        plans[launcher] = read_back(launcher, target, words)
        programs = dict(zip(LAUNCHERS, (*LAUNCHERS[:3], "python", "torchrun", "bash"), strict=True))
        assert words[0] == programs[launcher]
    assert [plans[each].strategy.launcher for each in LAUNCHERS] == [*LAUNCHERS[:3], "srun", "torchrun", "torchrun"]
    for plan in plans.values():
        assert plan.recipe == plans["torchrun"].recipe and plan.strategy.dims == plans["torchrun"].strategy.dims
        assert plan.recipe.batch.micro_batch_size == 2 and plan.recipe.output_dir == "runs/a;$HOME"
        assert plan.strategy.family == strategy and plan.strategy.world_size == 16


def test_the_answer_of_a_search_is_written_with_its_sizes(recipe, tmp_path, monkeypatch):
    """A search that may pick HSDP only, with other replicas than the file's, and the settings that it chose."""
    folder, out = tmp_path / "plan", tmp_path / "plan.json"
    monkeypatch.setattr(strategies, "shipped", lambda: [strategies.read("configs/hsdp.yaml")])
    monkeypatch.setattr(search, "sizes", lambda *_: [{"dp_replicate": 4}])
    command = ["plan", recipe, "--cluster", "h100x8", "--gpus", "32", "--json", str(out)]
    assert main([*command, "--output", str(folder), "--launcher", "slurm"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "cluster.yaml", "plan.json", "slurm.sh", "strategy.yaml",
    ]  # fmt: skip
    best = json.loads(out.read_text())["plans"][0]
    written = json.loads((folder / "plan.json").read_text())
    assert written["sizes"] == best["sizes"] and written["tokens_per_second"] == best["tokens_per_second"]
    replicas = yaml.safe_load((folder / "strategy.yaml").read_text())["parallelism_config"]
    assert replicas == {"parallelism_config_dp_replicate_size": 4} and best["sizes"]["shard"] == 8
    assert f"batch.micro_batch_size={best['micro_batch_size']}" in (folder / "slurm.sh").read_text()
    assert main(["plan", recipe, "--cluster", str(folder / "cluster.yaml"), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["plans"][0] == best
    assert read_cluster(str(folder / "cluster.yaml")).gpus == 32


def emitted(folder: Path, recipe: str, strategy: str, *launchers: str) -> int:
    command = ["plan", recipe, "--cluster", "h100x8", "--gpus", "16", "--strategy", f"configs/{strategy}.yaml"]
    return main([*command, "--output", str(folder), "--launcher", *launchers])


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_of_an_earlier_plan_go_and_others_stay(recipe, tmp_path):
    folder = tmp_path / "plan"
    assert emitted(folder, recipe, "zero3", "slurm", "deepspeed") == 0
    assert {"strategy.json", "slurm.sh", "deepspeed.sh", "hostfile", ".deepspeed_env"} <= contents(folder).keys()
    (folder / "notes.txt").write_text("mine")
    assert emitted(folder, recipe, "fsdp", "torchrun") == 0
    found = contents(folder)
    assert sorted(found) == ["cluster.yaml", "notes.txt", "plan.json", "strategy.yaml", "torchrun.sh"]
    assert found["notes.txt"] == "mine" and "FSDP" in found["strategy.yaml"]
    assert emitted(folder, recipe, "fsdp", "torchrun") == 0 and contents(folder) == found


@pytest.mark.parametrize("name", ["hostfile", "strategy.yaml", "plan.json"])
def test_nothing_that_was_edited_is_lost(name, recipe, tmp_path, capsys):
    """Neither addresses in a hostfile that goes, nor changes in a strategy that is replaced, nor another plan.json."""
    folder = tmp_path / "plan"
    assert emitted(folder, recipe, "zero3", "deepspeed") == 0
    (folder / name).write_text("[10]\n")
    before = contents(folder)
    assert emitted(folder, recipe, "fsdp", "torchrun") == 2
    shown = capsys.readouterr().err
    assert re.search(rf"^--output {folder}: .*\b{name}: not written by an earlier plan, or changed since; move", shown)
    assert contents(folder) == before


def test_a_folder_with_files_of_another_origin(recipe, tmp_path, capsys):
    (tmp_path / "strategy.yaml").write_text("mine")
    assert emitted(tmp_path, recipe, "fsdp", "torchrun") == 2
    assert f"--output {tmp_path}: strategy.yaml: not written by an earlier plan" in capsys.readouterr().err


def test_a_record_names_no_file_elsewhere(recipe, tmp_path):
    folder, other = tmp_path / "plan", tmp_path / "mine.txt"
    other.write_text("mine")
    assert emitted(folder, recipe, "fsdp", "torchrun") == 0
    record = json.loads((folder / "plan.json").read_text())
    record["files"]["../mine.txt"] = hashlib.sha256(b"mine").hexdigest()
    (folder / "plan.json").write_text(json.dumps(record))
    assert emitted(folder, recipe, "fsdp", "torchrun") == 0
    assert other.read_text() == "mine"


def test_an_emitted_recipe_can_be_planned_into_its_folder(tmp_path):
    config, folder = tmp_path / "config.json", tmp_path / "plan"
    config.write_text(json.dumps(LLAMA))
    assert emitted(folder, str(config), "fsdp", "torchrun") == 0
    written = (folder / "recipe.yaml").read_text()
    assert emitted(folder, str(folder / "recipe.yaml"), "zero1", "torchrun") == 0
    assert (folder / "recipe.yaml").read_text() == written


def test_a_model_without_a_recipe_gets_one(tmp_path):
    config, folder = tmp_path / "config.json", tmp_path / "plan"
    config.write_text(json.dumps(LLAMA))
    command = ["plan", str(config), "--cluster", "h100x8", "--output", str(folder), "--launcher", "torchrun"]
    assert main([*command, "batch.global_batch_size=16"]) == 0
    target = Target("", "", (), unnamed(1, 8))
    plan = read_back("torchrun", target, started_words(folder, "torchrun", tmp_path), ["data.path=docs"])
    assert plan.recipe.batch.global_batch_size == 16 and plan.recipe.model.config == LLAMA


def test_what_does_not_fit_or_is_unknown_is_not_written(recipe, tmp_path, capsys):
    folder = tmp_path / "plan"
    command = ["plan", recipe, "--cluster", "h100x8", "--output", str(folder)]
    assert main([*command, "--launcher", "pdsh"]) == 2
    assert "--launcher pdsh: expected one or more of accelerate, torchrun" in capsys.readouterr().err
    assert main([*command, "batch.sequence_length=16777216", "--strategy", "configs/ddp.yaml"]) == 6
    assert not folder.exists()


def test_files_that_the_configuration_refuses_are_reported(recipe, tmp_path, capsys, monkeypatch):
    """A key that slips past the search is found when the files are read back."""
    folder, describe = tmp_path / "plan", strategies.describe
    broken = tmp_path / "pipeline.json"
    content = json.loads((ROOT / "ds_configs" / "pipeline.json").read_text())
    broken.write_text(json.dumps({**content, "pipeline": {**content["pipeline"], "stage": 4}}))
    monkeypatch.setattr(strategies, "describe", lambda *given: (describe(*given)[0], []))
    assert main(["plan", recipe, "--cluster", "h100x8", "--strategy", str(broken), "--output", str(folder)]) == 2
    assert "pipeline.stage: unknown key" in capsys.readouterr().err
    assert not [*folder.iterdir()]  # nothing that would be refused can be started


def test_hosts_that_are_known_are_written(tmp_path):
    """For a launch without a plan: the addresses stand in the files, and the scripts ask for no HEAD."""
    target = Target(
        "recipes/sft.yaml", "configs/zero3.yaml", (), (HostSlots("10.0.0.1", 4), HostSlots("10.0.0.2", 4)), named=True
    )
    made = scripts.files("deepspeed", target, {"HF_HOME": "/models"})
    assert made["hostfile"] == "10.0.0.1 slots=4\n10.0.0.2 slots=4\n"
    assert made[".deepspeed_env"].splitlines() == ["TOKENIZERS_PARALLELISM=false", "HF_HOME=/models"]
    assert "HEAD=${HEAD:-10.0.0.1}" in scripts.files("torchrun", target)["torchrun.sh"]


def test_values_of_a_strategy_file_stay_those_of_the_plan(tmp_path, capsys):
    """The recipe leaves them open, the strategy's file sets them, and the emitted job trains with them."""
    recipe, strategy, folder = tmp_path / "recipe.yaml", tmp_path / "mine.json", tmp_path / "plan"
    left_open = {name: block for name, block in RECIPE.items() if name not in ("batch", "optimizer")}
    recipe.write_text(json.dumps({**left_open, "model": {"config": LLAMA}}))
    optimizer = {"type": "AdamW", "params": {"lr": 1.2e-5, "betas": [0.9, 0.98], "weight_decay": 0.05}}
    content = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": optimizer}
    content |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.3}
    strategy.write_text(json.dumps(content))
    command = ["plan", str(recipe), "--cluster", "h100x8", "--strategy", str(strategy), "--output", str(folder)]
    assert main([*command, "--launcher", "torchrun", "slurm"]) == 0
    assert "the strategy's file sets" in capsys.readouterr().out
    target = Target("", "", (), unnamed(1, 8))
    plan = read_back("torchrun", target, started_words(folder, "torchrun", tmp_path))
    batch, optimizer = plan.recipe.batch, plan.recipe.optimizer
    assert (batch.global_batch_size, batch.micro_batch_size, optimizer.max_grad_norm) == (64, 2, 0.3)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.betas) == (1.2e-5, 0.05, (0.9, 0.98))
    record = json.loads((folder / "plan.json").read_text())
    assert "batch.global_batch_size=64" in record["overrides"] and record["accumulation_steps"] == 4


def test_a_job_with_other_values_than_the_plan_is_refused(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(emission, "recipe_values", lambda *_: ["optimizer.weight_decay=0.7"])
    assert emitted(tmp_path / "plan", recipe, "fsdp", "torchrun") == 2
    assert "optimizer: the files make another job than the plan" in capsys.readouterr().err
    assert not [*(tmp_path / "plan").iterdir()]


def test_a_job_that_does_not_fit_its_processes_leaves_no_files(recipe, tmp_path, monkeypatch):
    def refused(*_):
        raise TopologyError("2 processes")

    monkeypatch.setattr(emission, "_check", refused)
    assert emitted(tmp_path / "plan", recipe, "fsdp", "torchrun") == TopologyError.exit_code
    assert not [*(tmp_path / "plan").iterdir()]


@pytest.mark.parametrize(
    ("content", "overrides"),
    [
        ({"model": {"config": LLAMA, "attention": "flash_attention_2"}}, []),
        ({"memory": {"activation_checkpointing": "selective", "selective_save": "attention"}}, []),
        ({"memory": {"activation_checkpointing": "every_n_layers", "every_n_layers": 4}}, []),
        ({"memory": {"activation_checkpointing": "every_n_layers", "every_n_layers": 4}}, ["--strategy", "zero2"]),
    ],
)
def test_a_search_writes_what_the_recipe_allows(content, overrides, tmp_path, capsys):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "plan"
    batch = {"global_batch_size": 64, "micro_batch_size": 1, "sequence_length": 2048}
    recipe.write_text(json.dumps({**RECIPE, "batch": batch, "model": {"config": LLAMA}, **content}))
    command = ["plan", str(recipe), "--cluster", "h100x8", "--output", str(folder), "--launcher", "torchrun"]
    assert main([*command, *overrides]) == 0
    plan = read_back("torchrun", Target("", "", (), unnamed(1, 8)), started_words(folder, "torchrun", tmp_path))
    record, memory = json.loads((folder / "plan.json").read_text()), plan.recipe.memory
    assert record["micro_batch_size"] == plan.recipe.batch.micro_batch_size
    if overrides:  # as the files say
        assert (memory.activation_checkpointing, memory.every_n_layers) == ("every_n_layers", 4)
    else:
        assert record["activation_checkpointing"] == memory.activation_checkpointing


def test_own_settings_that_may_change_rule_out_no_strategy(tmp_path):
    """24 rows in micro-batches of 24 are too few for 1F1B; a folded schedule takes no selective recomputation."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "plan.json"
    batch = {"global_batch_size": 24, "micro_batch_size": 24, "sequence_length": 512}
    memory = {"activation_checkpointing": "selective"}
    recipe.write_text(json.dumps({**RECIPE, "batch": batch, "memory": memory, "model": {"config": LLAMA}}))
    command = ["plan", str(recipe), "--cluster", "h100x2", "--json", str(out)]
    verdicts = {}
    for fixed in ([], ["batch.micro_batch_size=24", "memory.activation_checkpointing=selective"]):
        assert main([*command, *fixed]) == 0
        plans = json.loads(out.read_text())["plans"]
        verdicts[len(fixed)] = {name: [plan["verdict"] for plan in plans if plan["strategy"] == name] for name in PIPES}
    assert verdicts[0] == dict.fromkeys(PIPES, ["fits"]) and verdicts[2] == dict.fromkeys(PIPES, ["cannot run"])


PIPES = ("pipeline_1f1b", "pipeline_zbv", "pipeline_dualpipev")
