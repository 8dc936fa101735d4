"""distill under every kind of strategy, the teacher placed as the student is, against a loop of transformers and torch.

Which rows a step reads, and their tokens and labels, are taken from samecurve: test_sft.py compares those.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from harness import LLAMA, LORA, largest_relative_difference, long, relative_l2
from test_encoder_tasks import STEPS, Setting, start
from test_equal_curves import CONTEXT, ENGINES, SCHEDULES
from test_plain_loop import train
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config import loader
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.tasks import registry

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
TEMPERATURE, LABEL_WEIGHT = 2.0, 0.25
UNLIKE = {"hidden_size": 48, "num_hidden_layers": 4, "initializer_range": 0.2}
TEACHER = {**LLAMA, **UNLIKE, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
MAMBA2 = {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8}
MAMBA2 |= {"head_dim": 8, "n_groups": 1, "chunk_size": 8}
OTHER_TEACHERS = {
    "recurrent": MAMBA2,
    "tied": {**LLAMA, **UNLIKE},
    "gpt2": GPT2,
    "shallow": {**LLAMA, **UNLIKE, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def data(workspace) -> Path:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]

    def say() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 9)))

    path = workspace.folder / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": say(), "completion": say()}) + "\n" for _ in range(120)))
    return path


@pytest.fixture(scope="module")
def setting(workspace, data) -> Setting:
    common = [f"steps={STEPS}", "checkpoint.every_steps=5", f"data.path={data}", "batch.sequence_length=64"]
    common += [f"data.cache_dir={workspace.folder / 'cache'}", f"evaluate.every_steps={STEPS}"]
    common += ["batch.micro_batch_size=2"]
    tokenizer = registry.load_task(loader.read_recipe(str(workspace.recipe), ["task=sft", *common]).recipe).tokenizer
    for seed, (name, config) in enumerate(({"student": LLAMA, "teacher": TEACHER} | OTHER_TEACHERS).items(), start=1):
        more, fields = 0 if name == "student" else 8, dict(config)  # an embedding may be padded
        config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer) + more, **fields)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(workspace.folder / name)
        tokenizer.save_pretrained(workspace.folder / name)
    overrides = ["task=distill", *common, f"model={{path: {workspace.folder / 'student'}}}"]
    overrides += [
        f"tokenizer={{path: {workspace.folder / 'student'}}}",
        f"distill.teacher={workspace.folder / 'teacher'}",
    ]
    overrides += [f"distill.temperature={TEMPERATURE}", f"distill.label_weight={LABEL_WEIGHT}"]
    return Setting(tuple(overrides), *plain_loop(workspace, overrides))


def plain_loop(workspace, overrides):
    found = loader.read_recipe(str(workspace.recipe), overrides).recipe
    student = AutoModelForCausalLM.from_pretrained(found.model.path, dtype=torch.float32).train()
    teacher = AutoModelForCausalLM.from_pretrained(found.distill.teacher, dtype=torch.float32).eval()
    whole, counts = found.batch.model_copy(update={"micro_batch_size": 8}), []

    def steps():
        for (batch,) in StepBatches(registry.load_task(found).train, found.seed, whole, (0, 1), STEPS):
            divergence, label_loss, tokens = measured(student, teacher, batch)
            counts.append(tokens)
            yield ((1 - LABEL_WEIGHT) * divergence + LABEL_WEIGHT * label_loss) / tokens

    losses, norms = train(student, steps(), STEPS)
    return losses, norms, counts, {name: p.detach() for name, p in student.named_parameters()}


def measured(student, teacher, batch):
    """(divergence, label loss, tokens), the first two summed."""
    labels = batch.labels.flatten()
    logits = student(**batch.inputs).logits.flatten(0, 1)
    with torch.no_grad():
        wanted = teacher(**batch.inputs).logits.flatten(0, 1)[labels != -100, : logits.shape[-1]]
    said = (logits[labels != -100] / TEMPERATURE).log_softmax(dim=-1)
    p = (wanted / TEMPERATURE).softmax(dim=-1)
    divergence = TEMPERATURE**2 * (p * (p.log() - said)).sum()
    return divergence, functional.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


LONG = ("ddp", "zero1", "zero2", "zero3_hpz", "tp", *CONTEXT, "fsdp_tp_cp")
LONG += tuple(name for name in SCHEDULES if name not in ("pipeline_1f1b", "pp_fsdp_tp"))
WORLDS = {"single": 1, "zero3_hpz": 4, "fsdp_tp_cp": 4, "pipeline_fsdp": 4}
DIVIDED = dict.fromkeys(("fsdp", "zero3", *CONTEXT, "fsdp_tp_cp"), 2) | {"zero3_hpz": 4}


@pytest.mark.parametrize("strategy", ["zero3", "pipeline_1f1b", *long("single", "fsdp", *LONG)])
def test_follows_the_plain_loop(strategy, workspace, setting):
    run = start(workspace, setting, strategy, WORLDS.get(strategy, 2))
    assert run.facts["strategy"] == strategy and run.facts["world_size"] == WORLDS.get(strategy, 2)
    assert run.facts["engine"] == ENGINES[strategy]
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(workspace.folder / "teacher").parameters())
    held = run.facts["num_teacher_parameters_per_rank"]
    if run.facts["pipeline_stages"] == 1:
        assert held == pytest.approx(whole / DIVIDED.get(strategy, 1), rel=0.02 if strategy in DIVIDED else 0)
    else:
        assert 0 < held < whole
    assert run.column("tokens") == setting.counts
    assert largest_relative_difference(run.column("loss"), setting.losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), setting.norms) < 1e-4
    assert relative_l2(run.weights, setting.weights) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "teacher", "more"),
    [
        ("pipeline_1f1b", "gpt2", ("data.packing=true",)),
        ("pipeline_fsdp", "tied", ("distill.divergence=reverse_kl", "data.packing=true")),
        ("pipeline_zbv", "tied", ("data.packing=false", "data.group_by_length=true", "batch.global_batch_size=7")),
        ("pipeline_dualpipev", "gpt2", ()),
    ],
)
def test_other_teachers_in_stages(strategy, teacher, more, workspace, setting):
    """A head that is the first stage's embedding, learned positions, packed documents, rows that do not divide."""
    wanted = (*setting.overrides, f"distill.teacher={workspace.folder / teacher}", *more)
    rows = 1 if "batch.global_batch_size=7" in more else 2
    expected, run = (
        workspace.run(name, WORLDS.get(name, 2) if name else 1, *wanted, f"batch.micro_batch_size={rows}")
        for name in (None, strategy)
    )
    assert expected.returncode == run.returncode == 0, run.output
    assert run.facts["engine"] == ENGINES[strategy]
    assert run.column("tokens") == expected.column("tokens")
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    for key in ("eval_loss", "eval_divergence", "eval_tokens"):
        assert run.metrics[-1][key] == pytest.approx(expected.metrics[-1][key], rel=1e-5)


@pytest.mark.full
def test_a_teacher_with_too_few_layers_is_refused(workspace, setting):
    run = workspace.run("pipeline_zbv", 2, *setting.overrides, f"distill.teacher={workspace.folder / 'shallow'}")
    assert run.returncode != 0 and "ConfigurationError" in run.output
    for word in ("distill.teacher: ", "pipeline_zbv.yaml", "4 stages", "2 layers", "GPipe, 1F1B"):
        assert word in run.output


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3", "pipeline_1f1b", "pipeline_fsdp"])
def test_bf16_stays_near(strategy, workspace, setting):
    """The student and its teacher compute in bf16; as far off as docs/numerics.md says of a single model."""
    world = WORLDS.get(strategy, 2)
    run = workspace.run(None if world == 1 else strategy, world, *setting.overrides, "precision=bf16")
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), setting.losses) < 2e-2


@pytest.mark.parametrize("strategy", ["zero3"])
def test_the_held_out_numbers_are_the_exports(strategy, workspace, setting):
    run = start(workspace, setting, strategy)
    found = loader.read_recipe(str(workspace.recipe), setting.overrides).recipe
    student = AutoModelForCausalLM.from_pretrained(run.directory / "model").eval()
    teacher = AutoModelForCausalLM.from_pretrained(found.distill.teacher).eval()
    with torch.no_grad():
        sums = [
            measured(student, teacher, batch)
            for batch in EvaluationBatches(registry.load_task(found).validation, 1, (0, 1))
        ]
    divergence, label_loss, tokens = (float(sum(values)) for values in zip(*sums, strict=True))
    last = run.metrics[-1]
    assert last["eval_tokens"] == tokens
    assert last["eval_divergence"] == pytest.approx(divergence / tokens, rel=1e-5)
    assert last["eval_label_loss"] == pytest.approx(label_loss / tokens, rel=1e-5)
    whole = (1 - LABEL_WEIGHT) * divergence + LABEL_WEIGHT * label_loss
    assert last["eval_loss"] == pytest.approx(whole / tokens, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3", "pipeline_1f1b"])
def test_a_student_may_be_an_adapter(strategy, workspace, setting):
    expected, run = (workspace.run(name, 2 if name else 1, *setting.overrides, LORA) for name in (None, strategy))
    assert expected.returncode == run.returncode == 0, run.output
    assert run.facts["num_trained_parameters"] < run.facts["num_parameters"] / 2
    assert largest_relative_difference(run.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    assert run.metrics[-1]["eval_loss"] == pytest.approx(expected.metrics[-1]["eval_loss"], rel=1e-5)


@pytest.mark.full
def test_the_run_is_measured_again_by_itself(workspace, setting, tmp_path):
    run = start(workspace, setting, "zero3")
    command = [
        sys.executable,
        "-m",
        "samecurve",
        "evaluate",
        str(run.directory),
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = workspace.execute(command, run.directory)
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]
    assert found == {name: pytest.approx(run.metrics[-1][name], rel=1e-6) for name in found}
    assert {"eval_loss", "eval_divergence"} <= found.keys()


@pytest.mark.parametrize("teacher", ["teacher", "recurrent"])
@pytest.mark.parametrize("strategy", ["zero3", *long("zero2", "fsdp", "ddp")])
def test_buffers_are_fp32_in_bf16(strategy, teacher, workspace, setting):
    """A rotary embedding with bf16 frequencies is wrong by a radian at position 2,000; no short row would show it."""
    overrides = [*setting.overrides, "precision=bf16", f"distill.teacher={workspace.folder / teacher}"]
    found, alone = (
        workspace.probe("buffers_probe.py", name, world, *overrides) for name, world in ((strategy, 2), (None, 1))
    )
    assert found["engine"] == ENGINES[strategy]
    assert found["dtypes"] == alone["dtypes"] and {*found["dtypes"].values()} == {"torch.float32"}
    assert found["losses"] == pytest.approx(alone["losses"], rel=5e-3)
