"""Bytes that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Bytes of this rank's part, wherever it lies (device or host; what lies on a disk is not counted).

    weights: with buffers. optimizer: moments, and the fp32 weights that it keeps beside those that compute. gradients:
    of the trained ones while there are any, by formula, because most strategies have none between steps: of the
    weights' type, fp32 under DeepSpeed; whole on every rank unless Engine.describe says that they are sharded.
    gradients_between_steps: the part of it that stays.
    """

    weights: int
    optimizer: int
    gradients: int
    gradients_between_steps: int = 0
