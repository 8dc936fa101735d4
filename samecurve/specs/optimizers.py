"""The optimizers that a recipe can name. Importing this module does not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from samecurve.specs.data_names import ByName

# A recurrence's parameters: the logarithm of its decay, its skip connection and the bias of its step. The authors of
# Mamba (github.com/state-spaces/mamba), GatedDeltaNet and Kimi Linear keep them in fp32 and without weight decay.
RECURRENT = frozenset(("A_log", "D", "dt_bias"))


class OptimizerSpec(NamedTuple):
    """One optimizer: its builder, and facts for strategies, checkpoints and recipes.

    Attributes:
        builder: "module:function"; the function takes the arguments of optim.factory.build_optimizer.
        states: states per matrix that have the matrix's shape, by torch's or bitsandbytes' names.
        reads: keys of the recipe's `optimizer` block that this optimizer reads and some others do not.
        rates: its usual learning rates divided by AdamW's, (lower, upper end); None where they cannot be compared.
        whole: reason why the update of a weight cannot be computed from a shard of it; "" if it can.
    """

    builder: str
    states: tuple[str, ...]
    reads: tuple[str, ...]
    rates: tuple[float, float] | None
    whole: str = ""


_AS_ADAMW = (1.0, 1.0)
_BY_NAME = {
    "adamw": OptimizerSpec(
        "samecurve.optim.factory:adamw", ("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "implementation"), _AS_ADAMW
    ),
    "lion": OptimizerSpec("samecurve.optim.lion:build", ("exp_avg",), ("betas",), (1 / 10, 1 / 3)),
    "sgd": OptimizerSpec("samecurve.optim.factory:sgd", ("momentum_buffer",), ("momentum",), None),
    # adafactor's means of rows and columns do not have the shape of the matrix
    "adafactor": OptimizerSpec(
        "samecurve.optim.adafactor:build", (), (), None, whole="takes the means of each row and column of a matrix"
    ),
    "muon": OptimizerSpec(
        "samecurve.optim.muon:build",
        ("momentum_buffer",),
        ("betas", "epsilon", "momentum"),
        _AS_ADAMW,
        whole="orthogonalises whole matrices",
    ),
    "adamw_bf16": OptimizerSpec(
        "samecurve.optim.adamw_bf16:build", ("exp_avg", "exp_avg_sq"), ("betas", "epsilon", "bf16_rounding"), _AS_ADAMW
    ),
    "adamw_8bit": OptimizerSpec(
        "samecurve.optim.adamw_8bit:build",
        ("state1", "state2"),
        ("betas", "epsilon"),
        _AS_ADAMW,
        whole="quantizes blocks of 256 neighbouring values",
    ),
}
# A class of the user's own, see optim/own.py. It is not imported where this is read: its states count as AdamW's.
OWN_OPTIMIZER = OptimizerSpec("samecurve.optim.own:build", ("exp_avg", "exp_avg_sq"), ("options",), None)


OPTIMIZERS = ByName(_BY_NAME, OWN_OPTIMIZER)

# type checkers refuse a computed Literal, by which pydantic checks the recipe
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


# Constants of bitsandbytes. Tensors with fewer than SMALLEST_8BIT elements keep fp32 states.
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256


# AdamW on all weights. Classification: Devlin et al. 2018 (arXiv:1810.04805), A.3. Preferences: 5e-7 of Zephyr
# (arXiv:2310.16944) to 5e-6. The others are what published recipes of TRL, axolotl and sentence-transformers have.
ALL_WEIGHTS = {
    "pretrain": (1e-5, 3e-4),  # of a pretrained model, as continue_pretrain
    "continue_pretrain": (1e-5, 3e-4),
    "sft": (1e-5, 5e-5),
    "distill": (1e-5, 5e-5),
    "dpo": (5e-7, 5e-6),
    "reward": (5e-6, 2e-5),
    "classify": (2e-5, 5e-5),
    "token_classify": (2e-5, 5e-5),
    "process_reward": (5e-6, 2e-5),
    "mlm": (2e-5, 1e-4),
    "embed": (2e-5, 5e-5),
}
# Schulman et al. 2025, "LoRA Without Regret" (thinkingmachines.ai): the best rate is ten times that of all weights.
# Published recipes agree, for example 5e-6 for Zephyr's DPO with an adapter and 2e-4 for QLoRA's (arXiv:2305.14314).
ADAPTER_FACTOR = 10


def usual_rates(task: Any, is_adapted: bool, optimizer: Any) -> str:
    """Return "1e-5 to 5e-5" for a pretrained model; "" where there is no usual range, or for what is no name."""
    if not isinstance(task, str) or not isinstance(optimizer, str):  # read before the schema refuses it
        return ""
    ends, factors = ALL_WEIGHTS.get(task), OPTIMIZERS[optimizer].rates if optimizer in OPTIMIZERS else None
    if ends is None or factors is None:
        return ""
    times = ADAPTER_FACTOR if is_adapted else 1
    return " to ".join(
        f"{end * factor * times:.0e}".replace("e-0", "e-") for end, factor in zip(ends, factors, strict=True)
    )
