"""Scripts under DeepSpeed in one process, run by test_deepspeed_steps.py: python deepspeed_steps_probe.py [CASE ...].

Prints a JSON object: for each case the weights after its steps, or the refusal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samecurve
from samecurve.errors import ConfigurationError

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
OFFLOAD = {"device": "cpu"}
CASES: dict[str, Callable[[], Any]] = {}
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def case(run: Callable[[], Any]) -> Callable[[], Any]:
    CASES[run.__name__] = run
    return run


class Script:
    """A script of one kind: stage None is one process of PyTorch's own."""

    def __init__(self, stage: int | None, optimizer: Optimizer, steps: int = 1, alone: bool = False, **zero: Any):
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        plugin = None
        if stage is not None:
            config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": steps}
            config |= {"zero_optimization": {"stage": stage, **zero}, "gradient_clipping": "auto"}
            plugin = DeepSpeedPlugin(hf_ds_config=config)
        self.accelerator = samecurve.Accelerator(cpu=True, gradient_accumulation_steps=steps, deepspeed_plugin=plugin)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        data = DataLoader(TensorDataset(ROWS, ROWS.sum(1, keepdim=True).sin()), batch_size=4)
        if alone:
            self.accelerator.prepare(optimizer(model))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer(model), data)

    def train(self, stop: int = -1, norms: tuple[float, ...] = ()) -> Script:
        """Train an epoch, or leave it after `stop` micro-batches; norms: limits by step, 0 without clipping."""
        limits = iter(norms)
        for index, (x, y) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward((self.model(x) - y).square().mean())
                if self.accelerator.sync_gradients and (limit := next(limits, 0.0)):
                    self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if index + 1 == stop:
                break
        return self

    def weights(self) -> list[float]:
        return [number for weight in self.accelerator.get_state_dict(self.model).values() for number in weight.view(-1)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def stages() -> Iterator[tuple[str, int | None, dict]]:
    yield "single", None, {}
    for stage in (0, 1, 2, 3):
        yield f"zero{stage}", stage, {}
    for stage in (2, 3):
        yield f"zero{stage}_offload", stage, {"offload_optimizer": OFFLOAD}


@case
def offloaded_optimizers() -> dict:
    """SGD with momentum, and Adam's variants that DeepSpeed's lacks."""
    kinds: dict[str, Optimizer] = {
        "SGD": sgd,
        "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 0.05, amsgrad=True),
        "maximize": lambda model: torch.optim.AdamW(model.parameters(), 0.05, maximize=True),
    }
    return {
        kind: {
            name: Script(stage, made, **zero).train().weights() for name, stage, zero in stages() if stage in (None, 2)
        }
        for kind, made in kinds.items()
    }


@case
def left_within_a_step() -> dict:
    """A loop that is left after 3 of 6 micro-batches, two to a step, and one whole epoch."""
    return {name: Script(stage, sgd, 2, **zero).train(stop=3).train().weights() for name, stage, zero in stages()}


@case
def loaded_within_a_step() -> dict:
    made = {}
    for name, stage, zero in stages():
        with tempfile.TemporaryDirectory() as folder:
            script = Script(stage, sgd, 2, **zero).train(stop=2)
            script.accelerator.save_state(folder)
            iterator = iter(script.loader)
            with script.accelerator.accumulate(script.model):
                script.accelerator.backward(script.model(next(iterator)[0]).sum())
            script.accelerator.load_state(folder)
            made[name] = script.train().weights()
            iterator.close()
    return made


@case
def limits_of_single_steps() -> dict:
    """A limit is of its step: three steps of six are clipped."""
    norms = (0.05, 0.0, 0.1, 0.0, 0.0, 0.2)
    return {name: Script(stage, sgd, **zero).train(norms=norms).weights() for name, stage, zero in stages()}


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except ConfigurationError as error:
        return str(error)
    return ""


@case
def refusals() -> dict:
    script = Script(2, sgd)
    model, accelerator, other = script.model, script.accelerator, nn.Linear(4, 1)
    accelerator.backward(model(ROWS).mean())
    rate, ratio = torch.optim.lr_scheduler.StepLR(sgd(other), 1), OFFLOAD | {"ratio": 0.5}
    return {
        "part of the weights": refused(lambda: accelerator.clip_grad_norm_([*model.parameters()][:2], 1.0)),
        "other norm": refused(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, float("inf"))),  # pyright: ignore
        "second optimizer": refused(lambda: accelerator.prepare(other, sgd(other))),
        "late scheduler": refused(lambda: accelerator.prepare(rate)),
        "two schedulers": refused(lambda: accelerator.prepare(other, rate, rate)),
        "without its model": refused(lambda: Script(2, sgd, alone=True)),
        "ratio": refused(lambda: Script(3, sgd, offload_optimizer=ratio)),
        "of matrices": refused(lambda: Script(2, lambda model: torch.optim.Adafactor(model.parameters()))),
        "teacher": refused(lambda: Script(0, sgd).accelerator.prepare(other.requires_grad_(False))),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:] or [*CASES]
    print("RESULT " + json.dumps({name: CASES[name]() for name in chosen}, default=float), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
