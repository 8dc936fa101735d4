"""The code of docs/extending.md is a run whose curve is that of a loop in plain PyTorch, under every strategy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice

import pytest
import torch
from harness import ROOT, Workspace, largest_relative_difference, long, relative_l2
from test_equal_curves import ENGINES
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from samecurve.config import loader
from samecurve.data.batches import StepBatches
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weights import load_weights
from samecurve.tasks import registry

STEPS, SAVED = 20, 10
WORLDS = {"hsdp": 4}
UNVERIFIED = "export.verify=off"  # a new process with transformers takes seconds
LINES = 40  # of an example
NAMES = ["sums.yaml", "focal_task.py", "belief.py", "sums.py"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Workspace:
    """The files of the page in a folder, which is neither the working directory nor on sys.path."""
    project = Workspace(tmp_path_factory.mktemp("project"))
    page = (ROOT / "docs" / "extending.md").read_text()
    files = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert list(files) == NAMES
    for name, text in files.items():
        assert text.count("\n") + 1 <= LINES, name
        (project.folder / name).write_text(text)
    project.recipe = project.folder / "sums.yaml"
    return project


@pytest.fixture(scope="module")
def single(project):
    run = project.run(None, 1, UNVERIFIED)
    assert run.returncode == 0, run.output
    return run


def test_follows_a_loop_in_plain_torch(single, project, monkeypatch):
    """The rows are rendered, padded and shifted here, and focal loss and AdaBelief are written anew from the papers."""
    monkeypatch.setenv("SAMECURVE_CACHE", str(project.folder / "cache"))
    recipe = loader.load_recipe(str(project.recipe))
    task, tokenizer = registry.load_task(recipe), PreTrainedTokenizerFast.from_pretrained(single.directory / "model")
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    model = AutoModelForCausalLM.from_config(skeleton.config).train()
    tensors = dict([*model.named_buffers(), *model.named_parameters()])
    with torch.no_grad():
        load_weights(skeleton, recipe, lambda name, full: tensors[name].copy_(full))
    losses, norms, states = [], [], {}
    rates = [record["learning_rate"] for record in single.metrics]
    for step, batch in enumerate(islice(StepBatches(task.train, 0, recipe.batch, (0, 1), STEPS), STEPS), start=1):
        ids = torch.cat([micro.inputs["input_ids"] for micro in batch])
        texts = [tokenizer.decode(row).split("<|end_of_text|>")[0] for row in ids]
        total, count = torch.zeros(()), 0
        for text in texts:  # row by row: no padding
            question, answer = text.split("= ")
            assert eval(question) == int(answer)
            asked, said = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (question + "= ", answer))
            row = torch.tensor([*asked, *said, tokenizer.eos_token_id])
            targets = torch.arange(len(asked), len(row))
            likelihood = model(input_ids=row[None]).logits[0].softmax(-1)[targets - 1, row[targets]]
            total = total - ((1 - likelihood) ** 2 * likelihood.log()).sum()
            count += len(targets)
        (total / count).backward()
        losses.append((total / count).item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        with torch.no_grad():
            for weight in model.parameters():
                mean, variance = states.get(weight, (0, 0))
                mean = 0.9 * mean + 0.1 * weight.grad
                variance = 0.99 * variance + 0.01 * (weight.grad - mean) ** 2
                states[weight] = mean, variance
                scale = (variance / (1 - 0.99**step)).sqrt() + 1e-8
                weight *= 1 - rates[step - 1] * (0.1 if weight.dim() > 1 else 0)
                weight -= rates[step - 1] * mean / (1 - 0.9**step) / scale
                weight.grad = None
    assert largest_relative_difference(single.column("loss"), losses) < 1e-5
    assert largest_relative_difference(single.column("grad_norm"), norms) < 1e-4
    assert relative_l2(single.weights, {name: weight.detach() for name, weight in model.named_parameters()}) < 1e-4
    evaluated = single.metrics[-1]
    assert evaluated["eval_loss"] < evaluated["eval_cross_entropy"] < 6
    assert [*single.facts["own_code"]] == ["focal_task:FocalTask", "belief:AdaBelief", "sums:questions"]


@pytest.mark.parametrize("strategy", ["fsdp", *long("ddp", "zero1", "zero2", "zero3", "hsdp")])
def test_every_strategy_goes_on_with_the_curve(strategy, single, project):
    resumed = project.resume(single, SAVED, strategy, WORLDS.get(strategy, 2), UNVERIFIED)
    assert resumed.returncode == 0, resumed.output
    assert (resumed.facts["strategy"], resumed.facts["engine"]) == (strategy, ENGINES[strategy])
    assert resumed.facts["start_step"] == SAVED
    assert_same(resumed, single)


@pytest.mark.parametrize("strategy", long("ddp", "fsdp", "zero1", "zero2", "zero3", "hsdp"))
def test_every_strategy_trains_the_same_curve(strategy, single, project):
    rehearsed = ("rehearse=true",) if strategy == "ddp" else ()  # in processes that the ranks start
    run = project.run(strategy, WORLDS.get(strategy, 2), *rehearsed)
    assert run.returncode == 0, run.output
    assert (run.facts["strategy"], run.facts["engine"]) == (strategy, ENGINES[strategy])
    assert_same(run, single)
    back = project.resume(run, SAVED, None, 1)
    assert back.returncode == 0, back.output
    assert_same(back, single)


@pytest.mark.full
def test_an_optimizer_runs_under_deepspeeds_pipeline(project):
    pretrain = ("task=pretrain", "task_options={}", "data.text_column=question")
    runs = [project.run(strategy, world, *pretrain) for strategy, world in ((None, 1), ("pipeline", 2))]
    assert [run.returncode for run in runs] == [0, 0], runs[1].output
    assert_same(runs[1], runs[0])


@pytest.mark.full
def test_a_checkpoint_is_exported_and_evaluated_where_the_code_is_named(single, project):
    """In the folder of the code; without the names both commands refuse, see unit/test_own_code.py."""
    names = [word for path in single.facts["own_code"] for word in ("--own_code", path)]
    written = project.folder / "evaluated.json"
    for words in (
        ["evaluate", single.directory, "--json", written, *names],
        ["export", single.directory, "--checkpoint", "latest", *names],
    ):
        command = [sys.executable, "-m", "samecurve", *map(str, words)]
        done = subprocess.run(command, cwd=project.folder, env=project.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads(written.read_text())["metrics"]
    for name in ("eval_loss", "eval_cross_entropy"):
        assert evaluated[name] == pytest.approx(single.metrics[-1][name], rel=1e-5)


def assert_same(run, single) -> None:
    assert largest_relative_difference(run.column("loss"), single.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), single.column("grad_norm")) < 1e-4
    assert relative_l2(run.weights, single.weights) < 1e-4
