"""The single-process run against a loop written with transformers and torch alone, from the same pretrained folder.

The other strategies read the folder too, so that loading shard by shard is compared with transformers' own loading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from harness import LLAMA, STEPS, largest_relative_difference, long, relative_l2
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_with_min_lr_schedule_with_warmup,
)

from samecurve.config.schema import Batch
from samecurve.data.batches import StepBatches

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
MICRO = "batch.micro_batch_size=4"


@pytest.fixture(scope="module")
def pretrained(workspace, reference) -> Path:
    """A folder that transformers wrote, weights initialised by transformers."""
    folder = workspace.folder / "pretrained"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference.directory / "model")
    torch.manual_seed(1)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(workspace, pretrained):
    """(losses, gradient norms, weights) of a loop that a reader of the transformers documentation would write."""
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32).train()
    losses, norms = train(model, mean_losses(model, batches(workspace, pretrained)), STEPS)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def mean_losses(model, batches) -> Iterator[torch.Tensor]:
    """batches: ids, padding mask, labels; transformers shifts them."""
    for ids, mask, labels in batches:
        yield model(input_ids=ids, attention_mask=mask, labels=labels).loss


def train(
    model,
    losses: Iterator[torch.Tensor],
    steps: int,
    rate: float = 3e-3,
    warmup: int = 5,
    mlp: dict | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of the first steps.

    losses: each is computed when the step before is done. mlp: settings of the parameter group of the MLPs, if they
    have one. optimizer: in place of AdamW with the recipe's settings.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    own = [p for name, p in model.named_parameters() if mlp and p.requires_grad and ".mlp." in name]
    rest = [p for p in trained if not any(p is other for other in own)]
    matrices, vectors = ([p for p in rest if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups += [{"params": own, **(mlp or {})}] if own else []
    optimizer = optimizer or torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=0.1)
    values, norms = [], []
    for loss in islice(losses, steps):
        schedule.step()  # transformers counts updates from 0, and the update number 0 has the rate 0
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 0.8).item())
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values, norms


def batches(workspace, pretrained):
    """The same rows as unshifted ids, a padding mask and labels, as transformers wants them."""
    from samecurve.config import loader
    from samecurve.tasks import registry

    overrides = [f"model={{path: {pretrained}}}", f"tokenizer={{path: {pretrained}}}"]
    task = registry.load_task(loader.read_recipe(str(workspace.recipe), overrides).recipe)
    whole = Batch(global_batch_size=8, micro_batch_size=8, sequence_length=32)
    for (batch,) in StepBatches(task.train, 3, whole, (0, 1), STEPS):
        last = torch.where(batch.labels != -100, batch.labels, 0)[:, -1:]
        ids = torch.cat([batch.inputs["input_ids"], last], dim=1)
        trained = torch.cat([torch.ones(8, 1, dtype=torch.long), (batch.labels != -100).long()], dim=1)
        yield ids, trained, ids.masked_fill(trained == 0, -100)


@pytest.mark.parametrize("strategy", [None, "zero3", *long("ddp", "fsdp", "zero1", "pipeline")])
def test_follows_the_plain_loop(strategy, workspace, pretrained, plain):
    losses, norms, weights = plain
    arguments = (f"model={{path: {pretrained}}}", f"tokenizer={{path: {pretrained}}}", MICRO)
    run = workspace.run(strategy, 1 if strategy is None else 2, *arguments)
    assert run.returncode == 0, run.output
    assert run.facts["strategy"] == (strategy or "single")
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    assert relative_l2(run.weights, weights) < 1e-4


@pytest.mark.parametrize("strategy", [None, *long("zero3", "fsdp", "pipeline", "pipeline_1f1b")])
def test_parameter_groups_of_torch(strategy, workspace, pretrained):
    """Two frozen layers, and a rate and decay of its own for the MLPs of the others; what is frozen stays as it was."""
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32).train()
    frozen = {name for name, _ in model.named_parameters() if re.search(r"layers\.[01]\.|embed", name)}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    steps = mean_losses(model, batches(workspace, pretrained))
    losses, norms = train(model, steps, STEPS, mlp={"lr": 6e-3, "weight_decay": 0.5})
    run = workspace.run(
        strategy,
        1 if strategy is None else 2,
        *(f"model={{path: {pretrained}}}", f"tokenizer={{path: {pretrained}}}", MICRO),
        "optimizer.groups=[{pattern: '*.embed*', frozen: true}, {pattern: 'layers.[01].*', frozen: true}, "
        "{pattern: '*.mlp.*', learning_rate: 6e-3, weight_decay: 0.5}]",
    )
    if strategy == "pipeline":
        assert "all of stage 0 is frozen" in run.output and run.returncode != 0
        return
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    assert relative_l2(run.weights, {name: p.detach() for name, p in model.named_parameters()}) < 1e-4
    assert all(torch.equal(run.weights[name], model.get_parameter(name)) for name in frozen) and len(frozen) == 19
    assert run.column("learning_rate *.mlp.*") == pytest.approx([2 * rate for rate in run.column("learning_rate")])
    assert "layers.[01].*: frozen (18 weights, " in run.output and len(run.facts["optimizer_groups"]) == 4
    assert not frozen & json.loads((run.checkpoint(STEPS) / "index.json").read_text()).keys()


@pytest.mark.full
def test_a_frozen_stage_beside_one_that_is_clipped(workspace):
    arguments = (
        MICRO,
        "optimizer.max_grad_norm=0.01",
        "optimizer.groups=[{pattern: 'layers.[01].*', frozen: true}, {pattern: '*.embed*', frozen: true}]",
    )
    runs = [workspace.run(strategy, world, *arguments) for strategy, world in (("pipeline_1f1b", 2), (None, 1))]
    assert [run.returncode for run in runs] == [0, 0], runs[0].output
    assert min(runs[0].column("grad_norm")) > 0.01
    assert largest_relative_difference(*(run.column("loss") for run in runs)) < 1e-5
