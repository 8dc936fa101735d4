"""A script of a user's own, run as: states_probe.py STRATEGY STEPS OUTPUT [INPUT].

Trains a network with a frozen layer, a buffer and two learning rates, from the folder INPUT on, and saves to OUTPUT, on
the main process alone if OUTPUT ends in "of_main".
Prints, on rank 0, the distributed type and a JSON list of the losses on the same rows after each step.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samecurve


def start(strategy: str) -> samecurve.Accelerator:
    kwargs: dict = {}
    if strategy == "fsdp":
        kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    elif strategy.startswith("zero"):
        zero = {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 20}
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
        config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        kwargs["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config | {"zero_force_ds_cpu_optimizer": False})
    return samecurve.Accelerator(gradient_accumulation_steps=2, **kwargs)


def main() -> None:
    strategy, steps, output, *source = sys.argv[1:]
    accelerator = start(strategy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))
    torch.manual_seed(1 if source else 0)  # a loaded run's own weights and rows count for nothing
    model[2].requires_grad_(False)
    model.register_buffer("scale", 1 + torch.rand(3))
    if source:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[4].parameters()], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, 0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)
    fixed = inputs[:8].to(accelerator.device)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if source:
        accelerator.load_state(source[0])
    losses = []
    while len(losses) < int(steps):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    scale = getattr(model, "module", model).scale  # the buffer
                    losses.append(float((model(fixed) * scale).square().mean()))
            if len(losses) == int(steps):
                break
    end(accelerator, output, losses)


def end(accelerator: samecurve.Accelerator, output: str, losses: list[float]) -> None:
    if accelerator.is_main_process or not output.endswith("of_main"):
        accelerator.save_state(output)
    if os.environ.get("RANK", "0") == "0":
        print("LOSSES", accelerator.distributed_type.value, json.dumps(losses), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
