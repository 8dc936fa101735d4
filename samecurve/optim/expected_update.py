"""The values that one optimizer update should give a weight, computed in fp64 beside the optimizer's own kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samecurve.optim.muon import RMS_OF_ADAMW

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
    rate, decay = group["lr"], group["weight_decay"]
    w, g, ulp = weight.double(), gradient.double(), ULPS[weight.dtype]
    kept = w * (1 - rate * decay)
    if name == "sgd":
        mean, fresh = group["momentum"] * _double(states, "momentum_buffer"), g + decay * w
        slack = mean.abs() + g.abs() + decay * w.abs()
        return w - rate * (mean + fresh), RELATIVE * rate * slack + ulp * w.abs()
    if name == "lion":
        beta1 = group["betas"][0]
        mean, fresh = beta1 * _double(states, "exp_avg"), (1 - beta1) * g
        unsure = (mean + fresh).abs() <= RELATIVE * (mean.abs() + fresh.abs())  # rounding decides about the sign
        return kept - rate * (mean + fresh).sign(), 2 * rate * unsure + RELATIVE * rate + ulp * w.abs()
    if name == "muon" and group["muon"]:
        # orthogonalized: no singular value, and therefore no element, is above about 1.2
        return kept, torch.full_like(w, 2 * rate * RMS_OF_ADAMW * math.sqrt(max(group["shape"]))) + ulp * w.abs()
    if name == "adafactor" or (name == "adamw_8bit" and states):  # a quantized second moment may even be 0
        return kept, torch.full_like(w, math.inf)
    return _adamw(group, w, g, states, ulp)


def _adamw(
    group: Mapping[str, Any], w: Tensor, g: Tensor, states: Mapping[str, Tensor | float], ulp: float
) -> tuple[Tensor, Tensor]:
    (beta1, beta2), rate, step = group["betas"], group["lr"], float(states.get("step", 0)) + 1
    mean, fresh = beta1 * _double(states, "exp_avg"), (1 - beta1) * g
    square = beta2 * _double(states, "exp_avg_sq") + (1 - beta2) * g.square()
    scale = rate / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + group["eps"])
    exact = w + _double(states, "compensation")  # Kahan's rounding error
    slack = RELATIVE * scale * (mean.abs() + fresh.abs()) + ulp * exact.abs()
    lost = (square > 0) & (square < SMALLEST_SQUARE)
    return exact * (1 - rate * group["weight_decay"]) - scale * (mean + fresh), slack.masked_fill(lost, math.inf)


def _double(states: Mapping[str, Tensor | float], name: str) -> Tensor:
    return torch.as_tensor(states.get(name, 0.0)).double()
