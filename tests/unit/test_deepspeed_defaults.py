"""What DeepSpeed takes for values that its file leaves out, and messages about the numbers of one file."""

from __future__ import annotations

import json

import pytest
from report_cases import Plan
from test_public_strategies import SILENT, TYPED, ZERO2, accelerate, inline, resolved

from samecurve.cli.commands import main

LONG = SILENT.replace("steps: 10", "steps: 5000")


def values(plan, *keys: str) -> list:
    assert isinstance(plan, Plan), plan[0]
    blocks = [key.split(".") for key in keys]
    return [getattr(getattr(plan.recipe, block), name) for block, name in blocks]


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0}, {"momentum": 0.0}])
def test_sgd_decays_nothing(momentum, tmp_path, monkeypatch):
    optimizer = {"type": "SGD", "params": {"lr": 1e-2, **momentum}}
    plan = resolved(tmp_path, monkeypatch, "z.json", {"optimizer": optimizer, "zero_optimization": ZERO2})
    assert values(plan, "optimizer.name", "optimizer.weight_decay", "optimizer.momentum") == ["sgd", 0.0, 0.9]
    assert any("SGD without momentum is not built" in note for note in plan.notes)


@pytest.mark.parametrize(("given", "steps"), [({}, 1000), ({"warmup_num_steps": 7}, 7)])
def test_warmup_of_a_thousand_steps(given, steps, tmp_path, monkeypatch):
    content = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, **given}},
        "zero_optimization": ZERO2,
    }
    plan = resolved(tmp_path, monkeypatch, "z.json", content, recipe=LONG)
    assert values(plan, "schedule.warmup_steps", "schedule.name") == [steps, "constant"]
    if not given:
        plan = resolved(tmp_path, monkeypatch, "z.json", content, "schedule.warmup_steps=9", recipe=LONG)
        assert values(plan, "schedule.warmup_steps") == [9]


@pytest.mark.parametrize(
    ("keys", "overrides", "rows"),
    [
        ({}, (), 8),  # 4 rows on each of 2 ranks
        ({}, ("batch.global_batch_size=24",), 24),
        ({"gradient_accumulation_steps": "auto"}, (), 32),
        ({"train_batch_size": 16}, (), 16),
    ],
)
def test_a_micro_batch_alone_is_a_step(keys, overrides, rows, tmp_path, monkeypatch):
    content = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": ZERO2, **keys}
    plan = resolved(tmp_path, monkeypatch, "z.json", content, *overrides)
    assert values(plan, "batch.micro_batch_size", "batch.global_batch_size") == [4, rows]


def test_what_one_file_says_counts_before_defaults_of_the_other(tmp_path, monkeypatch):
    keys = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": ZERO2}
    (tmp_path / "z.json").write_text(json.dumps(keys))
    block = {"deepspeed_config_file": "z.json", "gradient_accumulation_steps": 3}
    content = accelerate("DEEPSPEED", mixed_precision="no", deepspeed_config=block)
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content)
    assert values(plan, "batch.global_batch_size") == [24] and plan.recipe.precision == "bf16"


@pytest.mark.parametrize(
    ("rows", "advice"),
    [(64, "the file's three numbers fit 8 ranks; remove one of them"), (65, "fit no number of ranks; remove one")],
)
def test_three_numbers_of_one_file(rows, advice, tmp_path, monkeypatch):
    keys = {"train_batch_size": rows, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    report, _ = resolved(tmp_path, monkeypatch, "z.json", {**keys, "zero_optimization": ZERO2})
    assert advice in report and "give the recipe" not in report and "the recipe sets" not in report


def test_problems_of_inline_keys_have_their_names(tmp_path, monkeypatch):
    content = inline(offload_optimizer_device="nvme")
    report, _ = resolved(tmp_path, monkeypatch, "a.yaml", content)
    assert ": deepspeed_config.offload_optimizer_nvme_path: missing" in report, report


def test_the_doctor_checks_recipe_and_strategy_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(TYPED + "optimizer: {learning_rate: 1e-3}\nschedule: {warmup_steps: 0}\n")
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "z.json").write_text(json.dumps({"train_batch_size": 32, "zero_optimization": ZERO2}))
    assert main(["doctor", "r.yaml", "--strategy", "z.json"]) == 2
    assert "train_batch_size: found 32, but the recipe sets this" in capsys.readouterr().err
    # on four ranks these agree
    accumulated = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2, "zero_optimization": ZERO2}
    (tmp_path / "z.json").write_text(json.dumps(accumulated))
    main(["doctor", "r.yaml", "--strategy", "z.json"])
    assert "gradient_accumulation_steps" not in capsys.readouterr().err
