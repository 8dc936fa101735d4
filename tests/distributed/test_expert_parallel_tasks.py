"""Every task under expert parallelism, with and without an adapter, against one process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from harness import LORA, Run, largest_relative_difference, long, relative_l2
from safetensors.torch import load_file
from task_columns import unread
from test_expert_parallel import config_of

CLASSES = ("cold", "mild", "warm")
TASKS = ("sft", "distill", "dpo", "reward", "classify", "embed")
ADAPTER = (LORA, "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj]")  # routers and experts cannot be adapted
WORLDS = {"fsdp_ep": 2, "fsdp_ep_tp": 4}


NAMES = ("prompt", "completion", "chosen", "rejected", "anchor", "positive", "negative", "text")


@pytest.fixture(scope="module")
def rows(workspace) -> Path:
    """What any of the tasks can read, with texts of very different lengths."""
    draw, path = random.Random(8), workspace.folder / "rows_for_experts.jsonl"
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 14)))

    made = [{name: f"{text()} {name[0]}{number}" for name in NAMES} for number in range(90)]
    path.write_text("".join(json.dumps(row | {"label": draw.choice(CLASSES)}) + "\n" for row in made))
    return path


@pytest.fixture(scope="module")
def base(workspace, rows) -> Path:
    """A trained mixture: what an adapter starts from, and what its teacher is."""
    return run_of(workspace, rows, "sft", None, config_of("mixtral")).directory / "model"


@pytest.fixture(scope="module")
def teacher(workspace, rows) -> Path:
    """Far from a new student: of a divergence near zero, rounding is a larger part."""
    far = "optimizer.learning_rate=3e-2"
    return run_of(workspace, rows, "sft", None, config_of("mixtral"), far).directory / "model"


def run_of(workspace, rows: Path, task: str, strategy: str | None, *more: str) -> Run:
    world = WORLDS[strategy] if strategy else 1
    arguments = [f"task={task}", "steps=6", "checkpoint.every_steps=3", "evaluate.every_steps=6"]
    arguments += [f"data={{path: {rows}, packing: false, validation_fraction: 0.15}}", "batch.sequence_length=48"]
    arguments += [f"data.ignore_columns=[{','.join(unread(task, NAMES))}]"]
    arguments += [f"batch.micro_batch_size={4 // world if strategy else 8}", *more]
    run = workspace.run(strategy, world, *arguments)
    assert run.returncode == 0, run.output
    assert run.facts["expert_parallel_size"] == (2 if strategy else 1)
    return run


def assert_follows(run: Run, expected: Run) -> None:
    assert run.column("tokens") == expected.column("tokens")
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    for key, value in expected.metrics[-1].items():
        if key.startswith("eval_"):
            assert run.metrics[-1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("strategy", long(*WORLDS))
@pytest.mark.parametrize("task", TASKS)
def test_every_task_follows_one_process(task, strategy, workspace, rows, teacher):
    taught = (f"distill.teacher={teacher}", f"tokenizer.path={teacher}") if task == "distill" else ()
    expected, run = (run_of(workspace, rows, task, name, config_of("mixtral"), *taught) for name in (None, strategy))
    assert_follows(run, expected)
    assert relative_l2(run.weights, expected.weights) < 1e-4


@pytest.mark.parametrize(
    ("task", "strategy", "variant"),
    long(
        *((task, strategy, "lora") for task in TASKS for strategy in WORLDS),
        *(("sft", "fsdp_ep", "dora"), ("sft", "fsdp_ep", "rslora"), ("sft", "fsdp_ep_tp", "rslora")),
    ),
)
def test_adapters_follow_one_process(task, strategy, variant, workspace, rows, base):
    """The experts are frozen, and still spread."""
    # a student that begins as its teacher's equal has labels to learn from
    taught = (f"distill={{teacher: {base}, label_weight: 0.5}}",) if task == "distill" else ()
    overrides = (f"model={{path: {base}}}", f"tokenizer={{path: {base}}}", *ADAPTER, *taught)
    overrides += () if variant == "lora" else (f"adapter.{variant}=true",)
    expected, run = (run_of(workspace, rows, task, name, *overrides) for name in (None, strategy))
    assert run.facts["num_trained_parameters"] < run.facts["num_parameters"] / 3
    assert_follows(run, expected)
    found, wanted = (load_file(each.directory / "model" / "adapter_model.safetensors") for each in (run, expected))
    assert relative_l2(found, wanted) < 1e-4
