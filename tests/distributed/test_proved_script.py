"""`prove` on scripts that know nothing of this project."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from samecurve.cli.commands import main
from samecurve.prove.judge import Run
from samecurve.prove.process import Watch
from samecurve.prove.script import Processes

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

accelerator = Accelerator(
    gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
set_seed(7)
rows = []
for index, tokens in enumerate(torch.randint(1, 100, (64, 16), generator=torch.Generator().manual_seed(1))):
    labels = tokens.clone()
    if "uneven" in sys.argv:
        labels[: index * 5 % 13] = -100
    rows.append({"input_ids": tokens, "labels": labels})
loader = DataLoader(rows, batch_size=2, shuffle=True)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, attention_dropout=0.1, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) // 2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(3)
rows = []
for index, tokens in enumerate(torch.randint(1, 100, (64, 16), generator=torch.Generator().manual_seed(1))):
    labels = tokens.clone()
    labels[: index * 5 % 13] = -100
    rows.append({"input_ids": tokens, "labels": labels})
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 20, "report_to": "none"}
arguments = TrainingArguments(__file__ + ".out", learning_rate=1e-3, save_strategy="no", disable_tqdm=True, **settings)
Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)), arguments, train_dataset=rows).train()
"""
TORCH = """
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
if not is_alone:
    dist.init_process_group("nccl")
torch.manual_seed(0)
inputs = torch.randn(64, 8)
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = model if is_alone else torch.nn.parallel.DistributedDataParallel(model)
loader = DataLoader(rows, batch_size=8, sampler=None if is_alone else DistributedSampler(rows, shuffle=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for given, wanted in loader:
    ((model(given) - wanted) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


OWN = """
import sys
import torch
from samecurve import Accelerator

accelerator = Accelerator(project_dir=sys.argv[1])
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 3)).mean())
optimizer.step()
accelerator.log({"eval_loss": 1.5}, step=1)
accelerator.save_state(sys.argv[1] + "/state")
"""


def prove(folder: Path, strategies: str, *words: str, script: str = SCRIPT) -> tuple[int, dict]:
    (folder / "train.py").write_text(script)
    command = ["prove", str(folder / "train.py"), "--strategies", strategies, "--steps", "2"]
    code = main([*command, "--output", str(folder / "proof"), "--", *words])
    return code, json.loads((folder / "proof" / "certificate.json").read_text())


def test_a_mean_of_means_is_found(tmp_path, capsys):
    code, proof = prove(tmp_path, "ddp", "uneven")
    assert code == 1 and not proof["passes"]
    (strategy,) = proof["strategies"]
    assert [finding["kind"] for finding in strategy["findings"]] == ["loss", "gradients", "norm", "weights"]
    assert strategy["findings"][0]["step"] == 1 and "a mean of means" in strategy["findings"][0]["text"]
    assert "ddp: loss, step 1: " in capsys.readouterr().out


def test_what_a_script_saves_and_logs_is_seen(tmp_path):
    """samecurve.Accelerator has methods of its own for both."""
    script, watch = tmp_path / "train.py", Watch(folder=str(tmp_path))
    script.write_text(OWN)
    with Processes(("peft",)) as processes:
        assert processes.run([0, str(tmp_path / "log"), asdict(watch), str(script), str(tmp_path)]) == 0
    events = [(event["event"], event["step"], event["value"]) for event in Run.read("", tmp_path).events]
    assert events == [("log", 1, {"eval_loss": 1.5}), ("save", 1, "")]


@pytest.mark.full
def test_a_right_script_passes(tmp_path):
    code, proof = prove(tmp_path, "ddp,fsdp,zero1,zero2,zero3")
    assert [strategy["findings"] + [strategy["reason"]] for strategy in proof["strategies"]] == [[""]] * 5
    assert code == 0 and proof["passes"]
    assert all(0 < strategy["differences"]["gradients"] < 1e-4 for strategy in proof["strategies"])


@pytest.mark.full
def test_settings_for_deepspeed_in_the_yaml_are_the_scripts(tmp_path):
    path = tmp_path / "stage_3.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}\n")
    code, proof = prove(tmp_path, str(path))
    assert code == 0 and proof["strategies"][0]["findings"] == []


@pytest.mark.full
@pytest.mark.parametrize(("script", "strategies"), [(TRAINER, "ddp,zero2"), (TORCH, "ddp")], ids=["trainer", "torch"])
def test_scripts_of_other_libraries_pass(script, strategies, tmp_path):
    code, proof = prove(tmp_path, strategies, script=script)
    assert [strategy["findings"] + [strategy["reason"]] for strategy in proof["strategies"]] in ([[""]], [[""]] * 2)
    assert code == 0


@pytest.mark.full
def test_rows_that_are_drawn_anew_are_not_judged(tmp_path):
    code, proof = prove(tmp_path, "ddp", script=TORCH.replace("model(given)", "model(given + torch.rand_like(given))"))
    (strategy,) = proof["strategies"]
    assert code == 1 and not strategy["passes"] and strategy["reason"].startswith("not judged: where one process")
