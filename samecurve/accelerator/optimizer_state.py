"""Access to an optimizer's per-parameter state, also before the first update, and to its step counter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Set the optimizer's step counter, from which Adam computes its bias correction."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(updates)
        elif "step" in state:
            state["step"] = updates
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        _replay(optimizer, updates)


def _replay(optimizer, updates: int) -> None:
    """Repeat the multiplications by which DeepSpeed's CPU Adam computes beta ** step."""
    group = optimizer.param_groups[0]
    values = [torch.zeros(1) for _ in range(4)]
    beta1, beta2 = group["betas"]
    # the optimizer updates that product step by step in fp32 (0.19.8, csrc/includes/cpu_adam.h); only the same
    # multiplications give the same bits
    for step in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *values
        )


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Iterable[str], create: bool) -> dict:
    """Return the optimizer's state of a parameter, or zeros before the first update.

    Args:
        parameter: one of its parameters, possibly a shard.
        names: keys of the state's tensors that must exist, for example "exp_avg".
        create: store the zeros in the optimizer.
    """
    state = optimizer.state.get(parameter) or {}  # [...] would store an empty one in this defaultdict
    if all(name in state for name in names):
        return state
    made = {**state, **_empty(optimizer, parameter, names)}
    if create:
        optimizer.state[parameter] = made
    return made


def _empty(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Iterable[str]) -> dict:
    """Create the states `names` of a parameter before its first update, with a step counter where needed."""
    own = getattr(optimizer, "empty_state", None)  # of samecurve.optim's classes
    if own is not None:
        return own(parameter)
    state = {name: torch.zeros_like(parameter) for name in names}
    if "exp_avg_sq" not in state:  # only Adam's bias correction counts steps
        return state
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":  # its step counter is an int
        return {"step": 0, **state}
    # the fused kernel needs the counter on the weight's device, the others on the CPU
    device = parameter.device if optimizer.defaults.get("fused") else "cpu"
    return {"step": torch.tensor(0.0, dtype=torch.float32, device=device), **state}
