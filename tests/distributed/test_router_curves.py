"""Mixtures of experts follow one process with their router loss, whatever the ranks and micro-batches."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from harness import largest_relative_difference, launch_command, long, relative_l2
from router_probe import FAMILIES
from task_columns import unread
from test_equal_curves import CONTEXT, ENGINES, SCHEDULES
from test_step_options import needs_compiler

MIXTRAL = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 1.0}
MIXTRAL |= {"router_jitter_noise": 0.1}
MODEL = f"model.config={json.dumps(MIXTRAL)}"
SHORT = "steps=8", "evaluate.every_steps=8", "checkpoint.every_steps=0"
WORLDS = {"ddp": 3, "fsdp": 2, "hsdp": 4, "zero1": 2, "zero2": 2, "zero2_offload": 2, "zero3": 3, "zero3_offload": 2}


@pytest.mark.parametrize("strategy", ["zero3"])
def test_a_run_follows_one_process(strategy, workspace):
    """Over the global batch, with uneven ranks, accumulation, recomputed layers and rows of different lengths."""
    overrides = MODEL, "model.router_loss=batch", *SHORT
    alone = workspace.run(None, 1, *overrides, "batch.micro_batch_size=8")
    more = "batch.micro_batch_size=2", "memory.activation_checkpointing=full"
    run = workspace.run(strategy, WORLDS[strategy], *overrides, *more)
    assert alone.returncode == run.returncode == 0, alone.output + run.output
    assert run.facts["engine"] == ENGINES[strategy] and run.column("step") == list(range(1, 9))
    for key, limit in (("loss", 1e-5), ("router_loss", 1e-5), ("grad_norm", 1e-4), ("expert_share_max", 1e-6)):
        assert largest_relative_difference(run.column(key), alone.column(key)) < limit, key
    assert all(sum(shares) == pytest.approx(1) and len(shares) == 4 for shares in run.column("expert_share"))
    assert run.metrics[-1]["eval_loss"] == pytest.approx(alone.metrics[-1]["eval_loss"], rel=1e-5)
    assert run.facts["router_loss"] == "batch: load balancing x 1.0" and "router loss" in run.output
    assert run.column("mfu")[-1] > 0 and not any(key.startswith("eval_router") for key in run.metrics[-1])


@pytest.fixture(scope="module")
def with_z_loss(workspace) -> tuple[str, str]:
    """Overrides: a stored model with a z-loss. Mixtral's own config has no such key, so no recipe can give it."""
    run = workspace.run(None, 1, MODEL, "model.router_loss=batch", *SHORT, "batch.micro_batch_size=8")
    assert run.returncode == 0, run.output
    folder = workspace.folder / "with_z_loss"
    shutil.copytree(run.directory / "model", folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"router_z_loss_coef": 0.5}))
    return f"model={{path: {folder}}}", f"tokenizer={{path: {folder}}}"


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp", "sequence"),
        *long(*((name, "batch") for name in ("fsdp", "zero3", "ddp", "fsdp_ep")), ("fsdp_ep", "sequence")),
    ],
)
def test_the_z_loss_follows_one_process(strategy, kind, workspace, with_z_loss):
    """Over two processes, each with two micro-batches of rows of different lengths."""
    overrides = *with_z_loss, f"model.router_loss={kind}", "steps=6", "evaluate.every_steps=0"
    alone = workspace.run(None, 1, *overrides, "batch.micro_batch_size=8")
    run = workspace.run(strategy, 2, *overrides, "batch.micro_batch_size=2")
    assert alone.returncode == run.returncode == 0, alone.output + run.output
    assert run.facts["strategy"] == strategy and run.facts["gradient_accumulation_steps"] == 2
    assert run.facts["expert_parallel_size"] == (2 if strategy == "fsdp_ep" else 1)
    assert run.facts["router_loss"] == f"{kind}: load balancing x 1.0, z-loss x 0.5"
    for key, limit in (("loss", 1e-5), ("router_loss", 1e-5), ("router_z_loss", 1e-5), ("grad_norm", 1e-4)):
        assert largest_relative_difference(run.column(key), alone.column(key)) < limit, key
    assert relative_l2(run.weights, alone.weights) < 1e-4
    z_loss = run.column("router_z_loss")
    assert z_loss[-1] < 0.9 * z_loss[0]  # trained, and not only reported


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(("strategy", "world"), [(None, 1), ("fsdp", 2)])
@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_compiled_layers_follow_one_process(strategy, world, kind, workspace):
    overrides = MODEL, f"model.router_loss={kind}", *SHORT
    alone = workspace.run(None, 1, *overrides, "batch.micro_batch_size=8")
    run = workspace.run(strategy, world, *overrides, "batch.micro_batch_size=2", "compile=regional")
    assert alone.returncode == run.returncode == 0, alone.output + run.output
    assert run.facts["engine"].startswith("FSDP") == (strategy == "fsdp") and "recompilations" in run.metrics[0]
    for key, limit in (("loss", 1e-5), ("router_loss", 1e-5), ("grad_norm", 1e-4)):
        assert largest_relative_difference(run.column(key), alone.column(key)) < limit, key


@pytest.mark.full
def test_the_router_loss_is_on_by_default_and_no_part_of_the_loss(workspace):
    overrides = MODEL, "batch.micro_batch_size=8", *SHORT, "export.enabled=false"
    runs = [workspace.run(None, 1, *overrides, f"model.router_loss={kind}") for kind in ("null", "off")]
    found, without = runs
    assert [run.returncode for run in runs] == [0, 0], found.output + without.output
    assert found.column("loss")[0] == without.column("loss")[0] and found.column("router_loss")[0] > 2
    assert found.column("grad_norm")[0] != without.column("grad_norm")[0]
    assert "router_loss" not in without.metrics[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "task",
    [
        ("task=embed", "model.router_loss=batch"),
        ("task=classify",),
        ("task=reward",),
        ("task=dpo", "dpo.loss=simpo", "dpo.gamma=0.5"),
    ],
)
def test_tasks_over_rows_and_pairs_follow_one_process(task, workspace, tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(50)]
    columns = "anchor", "positive", "text", "prompt", "chosen", "rejected"
    rows = [{name: " ".join(draw.choices(words, k=draw.randint(3, 20))) for name in columns} for _ in range(120)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"label": draw.choice("ab")}) + "\n" for row in rows))
    overrides = MODEL, "evaluate.every_steps=0", "checkpoint.every_steps=0", "export.enabled=false", f"data.path={path}"
    overrides += "steps=6", "data.packing=false", "data.validation_fraction=0", *task
    overrides += (f"data.ignore_columns=[{','.join(unread(task[0].removeprefix('task='), [*columns, 'label']))}]",)
    alone = workspace.run(None, 1, *overrides, "batch.micro_batch_size=8")
    run = workspace.run("ddp", 2, *overrides, "batch.micro_batch_size=3")
    assert alone.returncode == run.returncode == 0, alone.output + run.output
    for key, limit in (("loss", 1e-5), ("router_loss", 1e-5), ("grad_norm", 1e-4)):
        assert largest_relative_difference(run.column(key), alone.column(key)) < limit, key


def probed(workspace, strategy: str | None, world: int, micro_batch_size: int, folder: Path) -> dict:
    name = strategy or "single"
    path = workspace.strategy(name)
    script = str(Path(__file__).with_name("router_probe.py"))
    arguments = [str(folder), str(workspace.recipe), f"output_dir={folder / name}", "--strategy", str(path)]
    arguments += [f"batch.micro_batch_size={micro_batch_size}"]
    run = workspace.execute([*launch_command("fork", path, world, folder, script), *arguments], folder)
    assert run.returncode == 0, run.output
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.full
def test_every_family_follows_one_process_under_every_strategy(workspace, tmp_path):
    alone = probed(workspace, None, 1, 8, tmp_path)
    assert len(alone) == 2 * len(FAMILIES) == 16
    untried = {"single", "tp", "fsdp_tp", "fsdp_tp_cp", *CONTEXT, "pipeline", "zero3_nvme", "zero3_hpz", *SCHEDULES}
    assert WORLDS.keys() == ENGINES.keys() - untried
    problems = []
    for strategy, world in WORLDS.items():
        for name, found in probed(workspace, strategy, world, 2, tmp_path).items():
            assert ENGINES[strategy].removesuffix("LlamaForCausalLM") in found["engine"]
            for key, limit in (("loss", 1e-5), ("router_loss", 1e-5), ("grad_norm", 1e-4)):
                difference = largest_relative_difference(found[key], alone[name][key])
                problems += (
                    [f"{name} under {strategy}: {key} differs by {difference:.1e}"] if difference > limit else []
                )
    assert not problems, "\n".join(problems)
