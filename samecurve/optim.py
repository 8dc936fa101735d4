"""Parameter groups, optimizers by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .config import Optimizer, Recipe

if TYPE_CHECKING:
    import torch


class Traits(NamedTuple):
    """What an optimizer is to strategies and checkpoints.

    states: what it keeps per weight beside it, fp32 tensors of the weight's shape, by torch's names.
    reads: the keys of the recipe's `optimizer` block that not every optimizer has a use for.
    """

    states: tuple[str, ...]
    reads: tuple[str, ...]


TRAITS = {
    "adamw": Traits(("exp_avg", "exp_avg_sq"), ("betas", "epsilon")),
    "lion": Traits(("exp_avg",), ("betas",)),
    "sgd": Traits(("momentum_buffer",), ("momentum",)),
}


def state_names(settings: Optimizer, shapes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By name of every trained parameter: which states the optimizer keeps of it."""
    return dict.fromkeys(shapes, TRAITS[settings.name].states)


def num_bytes_per_parameter(settings: Optimizer) -> int:
    """Of weight, gradient and optimizer state, all fp32, on a device that holds everything."""
    return 4 * (2 + len(TRAITS[settings.name].states))


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

    rate, betas = settings.learning_rate, settings.betas
    if settings.name == "lion":
        from .optimizers.lion import Lion

        return Lion(groups, rate, betas)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum)
    # one kernel for the whole update, on CPUs and GPUs; left to itself torch takes one per operation
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.epsilon, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def empty_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: Iterable[str]) -> dict:
    """The states `names` of one parameter before its first update, and the counter of those that count."""
    import torch

    state = {name: torch.zeros_like(parameter) for name in names}
    if "exp_avg_sq" not in state:
        return state
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":  # it counts in an int
        return {"step": 0, **state}
    # the fused kernel wants the counter where the weight is, the others on the CPU
    device = parameter.device if optimizer.defaults.get("fused") else "cpu"
    return {"step": torch.tensor(0.0, dtype=torch.float32, device=device), **state}
