"""Dynamic loss scaling for fp16, based on the global gradient norm and therefore the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Loss scale that halves on overflow and doubles after `growth_interval` good steps.

    After Micikevicius et al. 2018, arXiv:1710.03740. torch.amp.GradScaler checks the local gradients for overflow;
    under FSDP2 these are shards, so ranks could disagree about skipping a step.
    """

    value: float = 2.0**16  # this and the interval are the defaults of torch.amp.GradScaler
    growth_interval: int = 2000
    minimum: float = 1.0
    good_steps: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum, so that an overflow means that the gradient itself is not finite."""
        return self.value <= self.minimum

    def update(self, applied: bool) -> None:
        """Adapt the scale to a finished step. Call it on all ranks with the same value."""
        if not applied:
            self.value, self.good_steps = max(self.value / 2, self.minimum), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
