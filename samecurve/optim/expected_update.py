"""The values that one optimizer update should give a weight, computed in fp64 beside the optimizer's own kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samecurve.optim.muon import RMS_OF_ADAMW
from samecurve.specs.data_names import is_import_path

RELATIVE = 1e-3  # of an update's size; kernels compute in fp32, and bitsandbytes applies the decay after the update
ULPS = {torch.float32: 2**-21, torch.bfloat16: 2**-7}  # of a weight, for its own rounding; stochastic rounding: one ulp
SMALLEST_SQUARE = 1e-36  # fp32 loses the precision of smaller second moments


def expected_update(
    name: str, group: Mapping[str, Any], weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor | float]
) -> tuple[Tensor, Tensor]:
    """Compute a weight's values after one update, and how far from them an optimizer's may be.

    Args:
        name: the recipe's optimizer.name.
        group: the weight's parameter group; `shape` is the weight's full shape.
        weight: (n,) values before the update.
        gradient: (n,) values of its gradient, after clipping.
        states: (n,) values of each of its states before the update by name, and the number of updates `step`; {} before
            the first.

    Returns:
        Two (n,) tensors in fp64. The distance is infinite where the update depends on more than these values.
    """
    w, g = weight.double(), gradient.double()
    kept = w * (1 - group["lr"] * group["weight_decay"])
    change, slack = _change(name, group, w, g, states)
    # each term may round; at a rate of 1e30 the decay is the largest, and values below `tiny` lose digits
    slack += torch.finfo(weight.dtype).tiny + ULPS[weight.dtype] * (w.abs() + kept.abs() + (kept + change).abs())
    return kept + change, slack


def _change(
    name: str, group: Mapping[str, Any], w: Tensor, g: Tensor, states: Mapping[str, Tensor | float]
) -> tuple[Tensor, Tensor]:
    """Compute the change beside the weight decay's, and the rounding error of an update in fp32; all in fp64."""
    rate = group["lr"]
    if name == "sgd":
        mean = group["momentum"] * _double(states, "momentum_buffer")
        return -rate * (mean + g), RELATIVE * rate * (mean.abs() + g.abs() + group["weight_decay"] * w.abs())
    if name == "lion":
        beta1 = group["betas"][0]
        mean, fresh = beta1 * _double(states, "exp_avg"), (1 - beta1) * g
        size = (mean + fresh).abs()  # rounding decides about the sign of a small one
        unsure = (size <= RELATIVE * (mean.abs() + fresh.abs())) | (size < torch.finfo(torch.float32).tiny)
        return -rate * (mean + fresh).sign(), 2 * rate * unsure + RELATIVE * rate
    if name == "muon" and group["muon"]:
        # orthogonalized: no singular value, and therefore no element, is above about 1.2
        largest = 2 * rate * RMS_OF_ADAMW * math.sqrt(max(group["shape"]))
        return torch.zeros_like(w), torch.full_like(w, largest)
    # a quantized second moment may even be 0
    if name == "adafactor" or is_import_path(name) or (name == "adamw_8bit" and states):
        return torch.zeros_like(w), torch.full_like(w, math.inf)
    (beta1, beta2), step = group["betas"], float(states.get("step", 0)) + 1
    mean, fresh = beta1 * _double(states, "exp_avg"), (1 - beta1) * g
    square = beta2 * _double(states, "exp_avg_sq") + (1 - beta2) * g.square()
    scale = rate / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + group["eps"])
    lost = (square > 0) & (square < SMALLEST_SQUARE)
    slack = RELATIVE * scale * (mean.abs() + fresh.abs())
    if name == "adamw_8bit":  # bitsandbytes decays the weight before the update on a CPU, and after it elsewhere
        slack += rate * group["weight_decay"] * (scale * (mean + fresh)).abs()
    # Kahan's rounding error is decayed with the weight
    error = _double(states, "compensation") * (1 - rate * group["weight_decay"])
    return error - scale * (mean + fresh), slack.masked_fill(lost, math.inf)


def _double(states: Mapping[str, Tensor | float], name: str) -> Tensor:
    return torch.as_tensor(states.get(name, 0.0)).double()
