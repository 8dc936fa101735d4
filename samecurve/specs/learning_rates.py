"""Usual peak learning rates for a pretrained model, by task, adapter and optimizer. Importing this loads no torch."""

from __future__ import annotations

from typing import Any

from samecurve.specs.optimizers import OPTIMIZERS

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
