"""The DeepSpeed JSON with every number that the recipe owns written in."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samecurve.strategy.plan import Plan


def resolve_auto(plan: Plan) -> dict:
    """Return the DeepSpeed config with the recipe's numbers: batch, accumulation, clipping, precision.

    The "pipeline" block is ours (DeepSpeed reads no stages from JSON), so it is left out.
    """
    recipe, strategy = plan.recipe, plan.strategy
    assert strategy.deepspeed is not None  # only the DeepSpeed engines call this
    config = copy.deepcopy(strategy.deepspeed)  # run.json has the file's content as it is
    config.pop("pipeline", None)
    micro, steps = recipe.batch.micro_batch_size, recipe.batch.accumulation_steps(strategy.dims.dp)
    # DeepSpeed wants the product; its engines get fewer rows where the global batch does not divide evenly
    config["train_batch_size"] = micro * steps * strategy.dims.dp
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = steps
    config["gradient_clipping"] = recipe.optimizer.max_grad_norm
    config.setdefault("zero_optimization", {"stage": 0})
    config["zero_allow_untested_optimizer"] = True  # DeepSpeed's word for an optimizer that the caller made
    for precision in ("bf16", "fp16"):
        config[precision] = {**config.get(precision, {}), "enabled": recipe.precision == precision}
    # the same rule as accelerator/loss_scaler.py where the JSON says nothing, so that the same steps are skipped
    config["fp16"] = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1, **config["fp16"]}
    return config
