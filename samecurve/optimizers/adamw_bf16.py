"""AdamW whose weights and moments are bf16, for half of the memory.

bf16 keeps 8 bits of a number, so rounding to the nearest undoes every update below 0.2 % of a weight. Two ways out:
rounded up or down at random, in proportion to what is cut off, weights move right on average (Gupta et al. 2015,
arXiv:1502.02551); or what rounding cuts off is kept, as bf16 too, and added before the next update (Kahan summation,
Zamirai et al. 2020, arXiv:2010.06192).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from .sharding import first_index, local

# The random bits are a hash of a value's place in its whole weight, of the step and of the weight, so they are the same
# under any sharding and after a resume. The constants are those of MurmurHash3's finalizer, public domain.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_PART = 2**24  # values at a time: their fp32 copies and random numbers are never there for a whole weight


class AdamWBf16(torch.optim.Optimizer):
    """groups: optim.parameter_groups', each with the `names` of its weights. kahan: instead of rounding at random.

    Kahan's state beside the moments: `compensation`, by how much the weight that is meant is above the weight.
    """

    def __init__(
        self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, seed: int, kahan: bool = False
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._seed = seed
        self._states = ("exp_avg", "exp_avg_sq", *(["compensation"] if kahan else []))

    def empty_state(self, weight: Tensor) -> dict:
        """What is kept of a weight before its first update; the counter of updates as an int."""
        return {"step": 0} | {name: torch.zeros_like(weight) for name in self._states}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """AdamW in fp32; the moments are rounded to the nearest bf16, the weights as the module says."""
        assert closure is None
        for group in self.param_groups:
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is not None:
                    self._update(group, name, weight)

    def _update(self, group: dict, name: str, weight: Tensor) -> None:
        if not self.state[weight]:
            self.state[weight] = self.empty_state(weight)
        state = self.state[weight]
        state["step"] += 1
        key = hashlib.sha256(f"{self._seed}:{name}:{state['step']}".encode()).digest()
        salt = int.from_bytes(key[:4], "little")
        kept = [state[name] for name in self._states]
        parts = (local(tensor).view(-1).split(_PART) for tensor in (weight, weight.grad, *kept))
        start = first_index(weight)
        for part, gradient, mean, square, *compensation in zip(*parts, strict=True):
            meant = part.float()
            if compensation:
                _update_part(group, state["step"], meant.add_(compensation[0]), gradient, mean, square)
                part.copy_(meant)
                compensation[0].copy_(meant.sub_(part))
            elif part.numel():
                _update_part(group, state["step"], meant, gradient, mean, square)
                part.copy_(rounded(meant, random_bits(start, part, salt)))
            start += part.numel()


def _update_part(group: dict, step: int, exact: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    """exact: the weight, fp32, which is updated; the moments are, too."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    gradient = gradient.float()
    new_mean = torch.lerp(mean.float(), gradient, 1 - beta1)
    new_square = torch.lerp(square.float(), gradient.square_(), 1 - beta2)
    mean.copy_(new_mean)
    square.copy_(new_square)
    root = new_square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    exact.mul_(1 - rate * group["weight_decay"]).addcdiv_(new_mean, root, value=-rate / (1 - beta1**step))


def rounded(exact: Tensor, bits: Tensor) -> Tensor:
    """One of the two bf16 values around each fp32 one, the nearer the likelier. bits: int32, from 0 to 65535.

    fp32 is bf16 with 16 more bits behind it: adding up to one unit of the last kept place and cutting off does it.
    """
    kept = exact.view(torch.int32).add_(bits).bitwise_and_(-65536)
    return kept.view(torch.float32).to(torch.bfloat16)


def random_bits(start: int, like: Tensor, salt: int) -> Tensor:
    """16 random bits, as int32, for each of the places from `start` on: (like.numel(),) on its device."""
    # modulo 2**32 in every step, as int32 counts; a weight has fewer places than that, or they begin again
    offset = (start * _GOLDEN + salt) % 2**32
    hashed = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    hashed.mul_(_signed(_GOLDEN)).add_(_signed(offset))
    for shift, factor in ((16, _FIRST), (13, _SECOND)):
        hashed.bitwise_xor_(hashed >> shift).mul_(_signed(factor))
    return hashed.bitwise_xor_(hashed >> 16).bitwise_and_(0xFFFF)


def _signed(value: int) -> int:
    """The int32 of the same 32 bits."""
    return value - 2**32 if value >= 2**31 else value
