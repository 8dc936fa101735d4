"""What strategies, checkpoints and recipes have to know of each optimizer."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerSpec(NamedTuple):
    """What an optimizer is to strategies and checkpoints.

    states: what it keeps of a matrix beside it, tensors of the matrix's shape, by torch's or bitsandbytes' names.
    reads: the keys of the recipe's `optimizer` block that not every optimizer has a use for.
    whole: why its update of a weight cannot be computed from a part of the weight alone, "" where it can.
    """

    states: tuple[str, ...]
    reads: tuple[str, ...]
    whole: str = ""


OPTIMIZERS = {
    "adamw": OptimizerSpec(("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "implementation")),
    "lion": OptimizerSpec(("exp_avg",), ("betas",)),
    "sgd": OptimizerSpec(("momentum_buffer",), ("momentum",)),
    "adafactor": OptimizerSpec((), (), "takes the means of each row and column of a matrix"),
    "muon": OptimizerSpec(("momentum_buffer",), ("betas", "epsilon", "momentum"), "orthogonalises whole matrices"),
    "adamw_bf16": OptimizerSpec(("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "bf16_rounding")),
    "adamw_8bit": OptimizerSpec(
        ("state1", "state2"), ("betas", "epsilon"), "quantizes blocks of 256 neighbouring values"
    ),
}


# bitsandbytes': what is smaller keeps fp32 states
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
