"""Adapters under every strategy against a loop of peft, transformers and torch alone; their checkpoints and exports.

The base model is the export of a short run. Its weights are frozen, so every strategy meets parameters without a
gradient, without a master and without an optimizer state.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Run, largest_relative_difference, long, relative_l2
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_equal_curves import ENGINES
from test_plain_loop import batches
from transformers import AutoModelForCausalLM, get_cosine_with_min_lr_schedule_with_warmup

from samecurve.adapter import initial

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, STOP = 10, 5
LOSS, NORM = 1e-5, 1e-4
LORA = "adapter={name: lora, rank: 4, alpha: 8}"
EVERY_DAY = ["single", "ddp", "fsdp", "zero2", "zero3", "pipeline"]
RARE = ["zero1", "hsdp", "zero2_offload", "zero3_offload"]


@pytest.fixture(scope="module")
def base(workspace) -> Path:
    run = workspace.run(None, 1, "steps=6", "checkpoint.every_steps=0", "batch.micro_batch_size=8", launcher="python")
    assert run.returncode == 0, run.output
    return run.directory / "model"


def arguments(base: Path, name: str, *more: str) -> tuple[str, ...]:
    micro = {"single": 4, "pipeline": 4, "hsdp": 1}.get(name, 2)  # accumulation: always 2
    settings = (
        f"model={{path: {base}}}",
        f"tokenizer={{path: {base}}}",
        f"steps={STEPS}",
        f"batch.micro_batch_size={micro}",
    )
    return (*settings, "evaluate.every_steps=5", LORA, *more)


def world(name: str) -> int:
    return {"single": 1, "hsdp": 4}.get(name, 2)


def run_lora(workspace, base: Path, name: str, *more: str) -> Run:
    strategy, launcher = (None, "python") if name == "single" else (name, "torchrun")
    run = workspace.run(strategy, world(name), *arguments(base, name, *more), launcher=launcher)
    assert run.returncode == 0, run.output
    assert_what_ran(run, name)
    return run


def assert_what_ran(run: Run, name: str) -> None:
    facts = run.facts
    assert (facts["strategy"], facts["engine"], facts["world_size"]) == (name, ENGINES[name], world(name))
    # rank 4 on q, k, v, o (32 and 16 wide), gate, up and down (32 and 64 wide) of 4 layers
    assert facts["num_trained_parameters"] == 4 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert facts["num_parameters"] > 3 * facts["num_trained_parameters"]


@pytest.fixture(scope="module")
def plain(workspace, base):
    """(losses, gradient norms, adapter) of a loop that a reader of peft's documentation would write."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = dict(initial({name.removeprefix("base_model.model."): p.shape for name, p in trained.items()}, seed=3))
    with torch.no_grad():  # the same draw; that it is of peft's distribution is a unit test's business
        for name, parameter in trained.items():
            parameter.copy_(ours[name.removeprefix("base_model.model.")])
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, STEPS, min_lr_rate=0.1)
    losses, norms = [], []
    for (ids, mask), _ in zip(batches(workspace, base), range(STEPS), strict=False):
        schedule.step()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 0.8).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name.replace(".default.", "."): p.detach() for name, p in trained.items()}
    return losses, norms, weights


@pytest.mark.parametrize("name", [*EVERY_DAY, *long(*RARE)])
def test_follows_the_plain_loop(name, workspace, base, plain):
    losses, norms, weights = plain
    run = run_lora(workspace, base, name)
    assert largest_relative_difference(run.column("loss"), losses) < LOSS
    assert largest_relative_difference(run.column("grad_norm"), norms) < NORM
    assert relative_l2(load_file(run.directory / "model" / "adapter_model.safetensors"), weights) < 1e-4
    assert losses[-1] < losses[0]
