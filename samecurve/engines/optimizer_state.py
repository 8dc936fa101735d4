"""What an optimizer keeps of a weight, also before the first update, and the updates that it counts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from samecurve.optim.factory import empty_state


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Adam's counter, from which it corrects its moments' bias."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(updates)
        elif "step" in state:
            state["step"] = updates
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        _replay(optimizer, updates)


def _replay(optimizer, updates: int) -> None:
    """DeepSpeed's CPU Adam keeps beta ** step as a product that it multiplies on, step by step, in fp32 (0.19.8,
    csrc/includes/cpu_adam.h); only the same multiplications give the same bits."""
    group = optimizer.param_groups[0]
    values = [torch.zeros(1) for _ in range(4)]
    beta1, beta2 = group["betas"]
    for step in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *values
        )


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Iterable[str], create: bool) -> dict:
    """The optimizer's state of a parameter. Before the first update there is none: zeros, which `create` keeps."""
    state = optimizer.state.get(parameter) or {}
    if all(name in state for name in names):
        return state
    made = {**state, **empty_state(optimizer, parameter, names)}
    if create:
        optimizer.state[parameter] = made
    return made
