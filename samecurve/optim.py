"""Parameter groups, optimizers by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .config import Optimizer, Recipe

if TYPE_CHECKING:
    import torch

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per weight, by torch's names: running means of the gradient and of its square."""


def learning_rate(recipe: Recipe, update: int) -> float:
    """Learning rate of the `update`-th applied update, 1-based; it depends on nothing else, so it resumes for free.

    Warm-up is linear and reaches the full rate at update `warmup_steps`. After it, with r = `final_ratio`:
    constant stays; linear and cosine reach r at the last step; wsd (warm-up, stable, decay) stays until the last
    `decay_steps` updates and falls linearly to r in them (Hu et al. 2024, arXiv:2404.06395).
    """
    schedule, peak = recipe.schedule, recipe.optimizer.learning_rate
    if update < schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    decay_steps = recipe.steps - schedule.warmup_steps
    if schedule.name == "wsd" and schedule.decay_steps is not None:
        decay_steps = schedule.decay_steps
    progress = min(max(update - (recipe.steps - decay_steps), 0) / max(decay_steps, 1), 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * falling)


def decayed(shape: Iterable[int]) -> bool:
    """Whether weight decay applies to a parameter of this shape: matrices and embeddings, not norms and biases."""
    return len(tuple(shape)) >= 2


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], shapes: dict[str, torch.Size], settings: Optimizer
) -> list[dict]:
    """Two groups, with and without weight decay; an empty one is left out.

    shapes: full shape by Hugging Face name. A sharded parameter's own shape may be anything, so it is not asked.
    """
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[decayed(shapes[name])].append(parameter)
    decay = {True: settings.weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decay[key]} for key, params in groups.items() if params]


def build_optimizer(groups: list[dict], settings: Optimizer) -> torch.optim.Optimizer:
    """The optimizer that `optimizer.name` asks for. The rate is set before every step (see `set_learning_rate`)."""
    import torch

    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def empty_state(parameter: torch.Tensor, integer_step: bool = False) -> dict:
    """AdamW's state of one parameter before its first update. integer_step: DeepSpeed's CPU Adam counts in an int."""
    import torch

    step = 0 if integer_step else torch.tensor(0.0, dtype=torch.float32)
    return {"step": step, **{name: torch.zeros_like(parameter) for name in STATE_NAMES}}
