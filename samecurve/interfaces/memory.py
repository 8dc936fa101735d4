"""Memory of a rank in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that this rank holds on device and host together; NVMe is not counted.

    Attributes:
        weights: parameters and buffers.
        optimizer: moments, and fp32 master weights where they are separate from the working weights.
        gradients: estimated bytes of gradients during a step (most strategies free them between steps). They have the
            weights' dtype, or fp32 under DeepSpeed, and are whole on every rank unless the strategy shards them.
        gradients_between_steps: part of `gradients` that stays allocated between steps.
    """

    weights: int
    optimizer: int
    gradients: int
    gradients_between_steps: int = 0
