"""Learning rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from samecurve.config.schema import Recipe


def learning_rate(recipe: Recipe, update: int) -> float:
    """Compute the learning rate of the `update`-th applied update (1-based).

    The rate depends on nothing else, so resuming needs no schedule state. Warm-up reaches the peak rate at update
    `recipe.warmup_steps`; before that the u-th update of w has a share of it of u / w, or log(u + 1) / log(w) with
    `warmup_type: log`, as DeepSpeed's WarmupLR after u steps (runtime/lr_schedules.py, _get_gamma). The schedules
    differ afterwards, with r = `min_lr_ratio`, a share of the peak rate:

    - constant stays at the peak.
    - linear and cosine reach r at the last step.
    - wsd (warm-up, stable, decay) stays at the peak until the last `decay_steps` updates, in which the rate falls
      linearly to r (Hu et al. 2024, arXiv:2404.06395).

    With `delay_steps` an update has the rate of the one so many updates before.
    """
    schedule, peak, warmup = recipe.schedule, recipe.optimizer.learning_rate, recipe.warmup_steps
    update = max(update - schedule.delay_steps, 0)
    if update < warmup:
        return peak * (
            math.log(update + 1) / math.log(max(warmup, 2)) if schedule.warmup_type == "log" else update / warmup
        )
    if schedule.name == "constant":
        return peak
    decay_steps = recipe.steps - warmup
    if schedule.name == "wsd" and schedule.decay_steps is not None:
        decay_steps = schedule.decay_steps
    progress = min(max(update - (recipe.steps - decay_steps), 0) / max(decay_steps, 1), 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * falling)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the rate of the next update; a parameter group's own rate is the `rate_factor` of the schedule's."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("rate_factor", 1.0)
