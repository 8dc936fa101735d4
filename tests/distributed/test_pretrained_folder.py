"""Whole runs from a folder that transformers wrote: one without the task's head, one whose attention is eager alone,
one with experts and an adapter, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import LORA
from tiny_families import packaged_config, round_trip_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertModel,
)

STEPS = ("steps=2", "schedule.warmup_steps=0", "checkpoint.every_steps=0", "evaluate.every_steps=0")


@pytest.fixture(scope="module")
def tokenizer(workspace):
    return AutoTokenizer.from_pretrained(workspace.base)


def folder(workspace, tokenizer, family: str) -> Path:
    path, config = workspace.folder / f"pretrained_{family}", round_trip_config(family)
    if not path.exists():
        torch.manual_seed(0)
        config.vocab_size = max(300, len(tokenizer))
        made = BertModel(config) if family == "bert" else AutoModelForCausalLM.from_config(config)
        made.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def run(workspace, path: Path, *overrides: str):
    origin = f"model={{path: {path}}}", f"tokenizer={{path: {path}}}"
    return workspace.run(None, 1, *origin, "batch.micro_batch_size=8", *STEPS, *overrides)


def test_an_encoder_gets_a_new_head_and_the_run_says_so(workspace, tokenizer):
    tokenizer.mask_token = tokenizer.eos_token
    path = folder(workspace, tokenizer, "bert")
    refused = run(workspace, path, "task=mlm")
    assert refused.returncode == 2 and "set model.new_head to true to make one" in refused.output
    done = run(workspace, path, "task=mlm", "model.new_head=true")
    assert done.returncode == 0, done.output
    assert "new head    drawn from seed 3, 5 parameters: cls.predictions.bias, " in done.output
    names = done.facts["new_head"]
    assert len(names) == 5 and all(name.startswith("cls.predictions.") for name in names)
    card = (done.directory / "model" / "README.md").read_text()
    assert f"| not pretrained | {', '.join(names)} |" in card
    _, found = AutoModelForMaskedLM.from_pretrained(done.directory / "model", output_loading_info=True)
    assert not found["missing_keys"]


def test_a_family_without_sdpa_trains_and_says_so(workspace, tokenizer):
    done = run(workspace, folder(workspace, tokenizer, "bloom"))
    assert done.returncode == 0, done.output
    assert "attention   eager: transformers has no sdpa for a bloom" in done.output
    assert done.facts["attention"] == "eager"


@pytest.mark.full
def test_an_adapter_beside_experts_is_found_and_merged(workspace, tokenizer):
    from samecurve.cli import commands

    path = folder(workspace, tokenizer, "mixtral")
    refused = run(workspace, path, LORA)
    assert refused.returncode == 2
    assert "the weights of experts or of a router; name the linear layers of attention instead" in refused.output
    assert "[k_proj, o_proj, q_proj, v_proj]" in refused.output
    done = run(workspace, path, LORA, "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj]")
    assert done.returncode == 0, done.output
    assert commands.main(["merge", str(done.directory)]) == 0  # proves that the logits are those of the two apart
    model, found = AutoModelForCausalLM.from_pretrained(done.directory / "merged", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == "mixtral"


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_text_part_of_a_packaged_model(adapter, workspace, tokenizer):
    from samecurve.cli import commands

    path = workspace.folder / "packaged"
    config = packaged_config("qwen3_5")
    config.get_text_config().vocab_size = 320
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    more = [LORA, "adapter.target_modules=[q_proj, out_proj, gate_proj]"] if adapter else []
    done = run(workspace, path, "data.packing=false", "data.group_by_length=true", "export.verify=1M", *more)
    assert done.returncode == 0, done.output
    kept = "text part of a qwen3_5; model.visual (33 tensors) kept as stored"
    assert done.facts["package"] == kept and kept in " ".join(done.output.split())
    assert "export reloaded by transformers" in done.output
    output = done.directory / "merged" if adapter else done.directory / "model"
    assert not adapter or commands.main(["merge", str(done.directory)]) == 0
    model, found = AutoModelForImageTextToText.from_pretrained(output, output_loading_info=True, dtype=torch.float32)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    before = dict(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).named_parameters())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("language_model" in name or name == "lm_head.weight" for name in changed)
    assert "AutoModelForImageTextToText" in (output / "README.md").read_text()
    assert commands.main(["generate", str(done.directory), "--prompt", "def", "--max_new_tokens", "3"]) == 0


def test_a_damaged_file_of_the_model_is_an_error_that_names_it(workspace, tokenizer):
    path = folder(workspace, tokenizer, "gpt2")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for more in ((), (LORA,)):  # an adapter's run reads the file before the model is built, too
        ended = run(workspace, path, *more)
        assert ended.returncode == 2, ended.output
        assert f"{file}: the file is damaged or incomplete: it has " in ended.output and "Traceback" not in ended.output
        status = json.loads((ended.directory / "status.json").read_text())
        assert status["exit_code"] == 2
