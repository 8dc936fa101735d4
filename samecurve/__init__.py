"""One training script, every parallel strategy, the same loss curve. Importing this package imports nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samecurve.accelerator.accelerator import Accelerator as Accelerator

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "Accelerator":
        raise AttributeError(f"module 'samecurve' has no attribute '{name}'")
    from samecurve.accelerator.accelerator import Accelerator  # imports torch

    return Accelerator
