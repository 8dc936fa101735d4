"""Facts about each optimizer for strategies, checkpoints and recipes."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerSpec(NamedTuple):
    """Facts about one optimizer.

    Attributes:
        states: states per matrix that have the matrix's shape, by torch's or bitsandbytes' names.
        reads: keys of the recipe's `optimizer` block that this optimizer reads and some others do not.
        whole: reason why the update of a weight cannot be computed from a shard of it; "" if it can.
    """

    states: tuple[str, ...]
    reads: tuple[str, ...]
    whole: str = ""


OPTIMIZERS = {
    "adamw": OptimizerSpec(("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "implementation")),
    "lion": OptimizerSpec(("exp_avg",), ("betas",)),
    "sgd": OptimizerSpec(("momentum_buffer",), ("momentum",)),
    # adafactor's means of rows and columns do not have the shape of the matrix
    "adafactor": OptimizerSpec((), (), "takes the means of each row and column of a matrix"),
    "muon": OptimizerSpec(("momentum_buffer",), ("betas", "epsilon", "momentum"), "orthogonalises whole matrices"),
    "adamw_bf16": OptimizerSpec(("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "bf16_rounding")),
    "adamw_8bit": OptimizerSpec(
        ("state1", "state2"), ("betas", "epsilon"), "quantizes blocks of 256 neighbouring values"
    ),
}


# Constants of bitsandbytes. Tensors with fewer than SMALLEST_8BIT elements keep fp32 states.
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
