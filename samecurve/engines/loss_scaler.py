"""Dynamic loss scaling for fp16, decided by the global gradient norm and therefore the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Halve on overflow, double after `growth_interval` good steps (Micikevicius et al. 2018, arXiv:1710.03740).

    torch.amp.GradScaler looks for overflow in the local gradients; under FSDP2 those are shards, and ranks would
    disagree about skipping.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    minimum: float = 1.0
    good_steps: int = 0

    @property
    def exhausted(self) -> bool:
        """An overflow now is no matter of scale: the gradient itself is not finite."""
        return self.value <= self.minimum

    def update(self, applied: bool) -> None:
        if not applied:
            self.value, self.good_steps = max(self.value / 2, self.minimum), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
