"""Adapters that peft has stored go on under every strategy, against a loop of peft and torch alone; DPO on them."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, largest_relative_difference, long, relative_l2
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from test_plain_loop import batches, mean_losses, train
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from samecurve.cli import commands

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, STOP, RATE, WARMUP, RATIO = 6, 3, 1e-3, 2, 4
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
WHOLE = {"tied": ["embed_tokens"], "experts": ["embed_tokens", "lm_head"]}
SETTINGS = {
    "tied": {"target_modules": "all-linear", "ensure_weight_tying": True},
    "experts": {"target_modules": ["q_proj", "v_proj"], "target_parameters": STACKS},
}
WORLDS = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2, "zero3_cut": 2}


@pytest.fixture(scope="module")
def bases(workspace, reference) -> dict[str, Path]:
    """The tied Llama of the reference run, and a mixture of experts with its tokenizer."""
    llama = reference.directory / "model"
    tokenizer = AutoTokenizer.from_pretrained(llama)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **EXPERTS)
    torch.manual_seed(1)
    folder = workspace.folder / "qwen3_moe"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"tied": llama, "experts": folder}


@pytest.fixture(scope="module")
def old(workspace, bases) -> dict[str, Path]:
    """Adapters as peft's users have them."""
    folders = {}
    for case, base in bases.items():
        torch.manual_seed(2)
        config = LoraConfig(r=4, lora_alpha=16, modules_to_save=WHOLE[case], **SETTINGS[case])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape))
        folders[case] = workspace.folder / f"old_{case}"
        model.save_pretrained(str(folders[case]))
    return folders


@pytest.fixture(scope="module")
def plain(workspace, bases, old):
    return {case: plain_loop(workspace, bases[case], old[case]) for case in bases}


def plain_loop(workspace, base: Path, folder: Path):
    """(losses, gradient norms, adapter) of peft's own model with its LoRA+ optimizer."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder, is_trainable=True).train()
    settings = {"loraplus_lr_ratio": RATIO, "loraplus_weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, **settings)
    steps = mean_losses(model, batches(workspace, base))
    losses, norms = train(model, steps, STEPS, warmup=WARMUP, optimizer=optimizer)
    return losses, norms, {name: value.detach() for name, value in get_peft_model_state_dict(model).items()}


def arguments(folder: Path, name: str) -> tuple[str, ...]:
    settings = f"steps={STEPS}", "checkpoint.every_steps=3", f"evaluate.every_steps={STEPS}", "model.router_loss=off"
    rates = f"optimizer.learning_rate={RATE}", f"schedule.warmup_steps={WARMUP}"
    micro = f"batch.micro_batch_size={8 if name == 'single' else 2}"
    return (*settings, *rates, micro, f"adapter={{path: {folder}, loraplus_lr_ratio: {RATIO}}}")


def run_of(workspace, folder: Path, name: str):
    strategy = None if name == "single" else name
    if name == "zero3_cut":  # DeepSpeed would keep such small weights whole
        threshold = {"stage": 3, "stage3_param_persistence_threshold": 0}
        strategy = workspace.strategy("zero3", zero_optimization=threshold)
    run = workspace.run(strategy, WORLDS[name], *arguments(folder, name))
    assert run.returncode == 0, run.output
    assert run.facts["num_parameters_per_rank"] < 0.6 * run.facts["num_parameters"] or name not in ("zero3_cut", "fsdp")
    assert (
        run.facts["strategy"] == name.removesuffix("_cut")
        and f"training goes on with the adapter in {folder}" in run.output
    )
    return run


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("experts", "zero3_cut"),
        *long(*((c, n) for c in SETTINGS for n in WORLDS if (c, n) != ("experts", "zero3_cut"))),
    ],
)
def test_goes_on_as_pefts_own_loop(case, name, workspace, old, bases, plain):
    losses, norms, weights = plain[case]
    run = run_of(workspace, old[case], name)
    assert run.column("loss")[0] == pytest.approx(losses[0], rel=1e-6)
    assert largest_relative_difference(run.column("loss"), losses) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), norms) < 1e-4
    stored = load_file(run.directory / "model" / "adapter_model.safetensors")
    assert stored.keys() == weights.keys() and relative_l2(stored, weights) < 1e-4
    start = load_file(old[case] / "adapter_model.safetensors")
    moved = {key: value for key, value in stored.items() if not torch.equal(value, start[key])}
    assert moved.keys() == stored.keys() and relative_l2(stored, start) > 1e-3
    base = AutoModelForCausalLM.from_pretrained(bases[case], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.directory / "model").eval()  # on the original base
    assert model.peft_config["default"].base_model_name_or_path == str(bases[case])


@pytest.mark.parametrize(
    ("origin", "name"), long(("fsdp", "zero3"), ("zero3", "single"), ("ddp", "fsdp"), ("zero2", "ddp"))
)
@pytest.mark.parametrize("case", SETTINGS)
def test_another_strategy_goes_on(case, origin, name, workspace, old):
    golden = run_of(workspace, old[case], origin)
    strategy = None if name == "single" else name
    run = workspace.resume(golden, STOP, strategy, WORLDS[name], *arguments(old[case], name))
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), golden.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), golden.column("grad_norm")) < 1e-4


@pytest.mark.full
def test_another_adapter_in_the_folder_is_refused(workspace, old, tmp_path):
    source = run_of(workspace, old["tied"], "single")
    other = tmp_path / "other"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(workspace.base), old["tied"])
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).add_(1.0)
    model.save_pretrained(str(other))
    run = workspace.resume(source, STOP, None, 1, *arguments(other, "single"))
    assert run.returncode == 4 and "not the one that the checkpoint's run went on with" in run.output, run.output


def pairs_file(folder: Path) -> Path:
    draw, path = random.Random(4), folder / "pairs.jsonl"
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(20)]
    names = ("prompt", "completion", "chosen", "rejected")
    rows = [{name: " ".join(draw.choices(words, k=6)) for name in names} for _ in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["single", *long("fsdp", "zero3")])
def test_dpo_refers_to_the_model_with_the_adapter(name, workspace, old, bases, tmp_path, monkeypatch):
    """ln 2 in the first step, where a model is its own reference; those of both runs share a cache."""
    base = f"model={{path: {bases['tied']}}}", f"tokenizer={{path: {bases['tied']}}}"
    adapters = (*base, "adapter={name: lora, rank: 4}"), (f"adapter={{path: {old['tied']}}}",)
    more = ("task=dpo", "steps=3", "checkpoint.every_steps=0", "evaluate.every_steps=3", "data.validation_fraction=0.2")
    more += (
        f"data.path={pairs_file(workspace.folder)}",
        "data.ignore_columns=[completion]",
        "data.packing=false",
        "data.chat=false",
    )
    more += ("dpo.beta=0.5", "batch.sequence_length=64")
    for adapter in adapters if name == "single" else adapters[1:]:
        strategy = None if name == "single" else name
        run = workspace.run(strategy, WORLDS[name], *arguments(old["tied"], name), *adapter, *more)
        assert run.returncode == 0, run.output
        losses = run.column("loss")
        assert losses[0] == pytest.approx(math.log(2), rel=1e-6) and losses[1] != losses[0]
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "empty"))  # so that the reference is computed anew
    assert commands.main(["evaluate", str(run.directory), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["metrics"]
    assert found["eval_loss"] == pytest.approx(run.metrics[-1]["eval_loss"], rel=1e-5)


@pytest.mark.full
def test_commands_of_the_page(workspace, bases, tmp_path):
    page = (ROOT / "docs" / "finetuning.md").read_text().partition("### Going on with an adapter")[2]
    block = re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1].replace("\\\n", " ")
    commands = [line for line in block.splitlines() if line.startswith("python ")]
    model, pairs = tmp_path / "chat", pairs_file(tmp_path)
    AutoModelForCausalLM.from_pretrained(bases["tied"]).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(bases["tied"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    tokenizer.save_pretrained(model)
    outputs = []
    for command in commands:
        words = command.replace("MODEL", str(model)).replace("recipes/", f"{ROOT}/recipes/").split()[1:]
        if words[0] == "train.py":
            unread = {"lora.yaml": "[chosen,rejected]", "dpo.yaml": "[completion]"}[words[1].rpartition("/")[2]]
            words[0] = str(ROOT / "train.py")
            words += [f"data.path={pairs}", f"data.ignore_columns={unread}", "data.validation_fraction=0", "steps=2"]
            words += ["batch.sequence_length=48", "evaluate.every_steps=0", "schedule={name: constant}", "epochs=null"]
        settings = {"cwd": tmp_path, "env": workspace.environment(), "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, *words], **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert len(commands) == 4 and "training goes on with the adapter in runs/lora/model" in outputs[1]
    for name in ("dpo", "dpo_merged"):
        first = json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[0])
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    stored = {
        name: load_file(tmp_path / "runs" / name / "model" / "adapter_model.safetensors") for name in ("lora", "dpo")
    }
    assert stored["lora"].keys() == stored["dpo"].keys() and 0 < relative_l2(*stored.values()) < 1
