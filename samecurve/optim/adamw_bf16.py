"""AdamW with weights and moments in bf16, for half of the memory.

bf16 keeps 8 significant bits, so rounding to nearest loses every update below 0.2 % of a weight. Two remedies exist:

- Stochastic rounding rounds up or down at random in proportion to the remainder, so that weights move correctly on
  average (Gupta et al. 2015, arXiv:1502.02551).
- Kahan summation keeps the rounding error, also in bf16, and adds it before the next update (Zamirai et al. 2020,
  arXiv:2010.06192).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from samecurve.config.schema import Optimizer
from samecurve.optim.dtensor import first_index, local_gradient, to_local

# The random bits are a hash of the value's index in the full weight, the step and the weight's name, so they are the
# same under any sharding and after a resume. The constants are those of MurmurHash3's finalizer, public domain.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_PART = 2**24  # values at a time, so that fp32 copies and random numbers never exist for a whole weight


class AdamWBf16(torch.optim.Optimizer):
    """AdamW for bf16 weights, with stochastic rounding or Kahan summation.

    Kahan summation adds the state `compensation`: the intended weight minus the rounded weight.

    Args:
        groups: from optim.parameter_groups, each with the `names` of its weights.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: epsilon of AdamW's denominator.
        seed: seed of stochastic rounding.
        kahan: use Kahan summation instead of stochastic rounding.
    """

    def __init__(
        self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, seed: int, kahan: bool = False
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._seed = seed
        self._states = ("exp_avg", "exp_avg_sq", *(["compensation"] if kahan else []))

    def empty_state(self, weight: Tensor) -> dict:
        """Create a weight's state before its first update; the step counter is an int."""
        return {"step": 0} | {name: torch.zeros_like(weight) for name in self._states}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Apply AdamW in fp32. Moments are rounded to the nearest bf16, weights as the module docstring describes."""
        assert closure is None
        for group in self.param_groups:
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight] = self.empty_state(weight)
                state = self.state[weight]
                state["step"] += 1
                key = hashlib.sha256(f"{self._seed}:{name}:{state['step']}".encode()).digest()
                salt = int.from_bytes(key[:4], "little")
                local = to_local(weight), local_gradient(weight), *(to_local(state[kind]) for kind in self._states)
                # .data, because torch.compile would compile views of a matrix and of a vector separately
                tensors = [tensor.view(-1).data for tensor in local]
                if not tensors[0].numel():  # this rank has no part of the weight
                    continue
                numbers = _numbers(*group["betas"], group["lr"], group["weight_decay"], group["eps"], state["step"])
                update, size = update_part, _PART
                if can_compile_update(tensors[0].device, "compensation" in self._states):
                    update, size = compiled_update(), tensors[0].numel()
                    numbers = _on_device(numbers, tensors[0].device)
                start = first_index(weight)
                for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True):
                    update(numbers, first_hash(start, salt), *parts)
                    start += parts[0].numel()


def update_part(
    numbers: Sequence[float] | Tensor,
    hashed: int,
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    compensation: Tensor | None = None,
) -> None:
    """Update a contiguous part of a weight and of its state in place.

    All tensors have shape (n,). The gradient is not changed.

    Args:
        numbers: from `_numbers`.
        hashed: `first_hash` of the first value.
        weight: bf16 values of the weight; fp32 ones are not rounded.
        gradient: their gradient.
        mean: their first moment.
        square: their second moment.
        compensation: Kahan's state; None for stochastic rounding.
    """
    mean_rate, square_rate, correction, epsilon, keep, rate = numbers
    exact, gradient = weight.float(), gradient.float()
    if compensation is not None:
        exact.add_(compensation)
    new_mean = torch.lerp(mean.float(), gradient, mean_rate)
    new_square = torch.lerp(square.float(), gradient.square(), square_rate)
    mean.copy_(new_mean)
    square.copy_(new_square)
    root = new_square.sqrt_().div_(correction).add_(epsilon)
    exact.mul_(keep).addcdiv_(new_mean.mul_(rate), root)
    if weight.dtype == torch.float32:  # a weight of fp32_weights.py
        weight.copy_(exact)
        return
    if compensation is None:
        weight.copy_(rounded(exact, random_bits(hashed, exact)))
        return
    kept = rounded(exact.clone(), to_nearest(exact))  # a clone, because rounded works in place
    weight.copy_(kept)
    compensation.copy_(exact.sub_(kept))


@lru_cache(maxsize=8)  # weights share them
def _numbers(beta1: float, beta2: float, rate: float, decay: float, epsilon: float, step: int) -> tuple[float, ...]:
    """Compute the scalars of an update in the order that `update_part` expects."""
    return 1 - beta1, 1 - beta2, (1 - beta2**step) ** 0.5, epsilon, 1 - rate * decay, -rate / (1 - beta1**step)


@lru_cache(maxsize=8)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Convert to a tensor, because torch.compile would recompile for new Python numbers (seen with torch 2.13)."""
    return torch.tensor(numbers).to(device, non_blocking=True)


@lru_cache(maxsize=1)
def compiled_update() -> Callable[..., None]:
    """Compile `update_part` into one kernel for GPUs.

    By count, not measured: the eager version reads and writes 250 bytes per weight in its 40 operations, which for 8
    billion weights takes half a second of an H200's memory bandwidth; the kernel reads and writes 14.
    """
    return torch.compile(update_part, dynamic=True)


@lru_cache(maxsize=8)
def can_compile_update(device: torch.device, kahan: bool) -> bool:
    """Whether `compiled_update` supports this device and works on it."""
    return device.type == "cuda" and compiled_update_agrees(device, kahan)


def compiled_update_agrees(device: torch.device, kahan: bool) -> bool:
    """Whether `compiled_update` compiles and gives the results of `update_part`; otherwise a warning gives the reason.

    Compilation needs Triton and a C compiler. `kahan` selects the update with compensation.
    """
    numbers = _numbers(0.9, 0.95, 1e-3, 0.1, 1e-8, 1)
    values = torch.linspace(-2, 2, 4096, device=device).bfloat16()
    tensors = [values, values.cos(), *(torch.zeros_like(values) for _ in range(3 if kahan else 2))]
    expected = [tensor.clone() for tensor in tensors]
    update_part(numbers, first_hash(0, salt=7), *expected)
    try:
        compiled_update()(_on_device(numbers, device), first_hash(0, salt=7), *tensors)
    except Exception as error:  # from Triton, the C compiler or torch.compile
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    else:
        if (torch.stack(tensors) == torch.stack(expected)).double().mean() > 0.99:
            return True
        reason = "its results are wrong"
    warnings.warn(
        f"optimizer.name: adamw_bf16 runs without its fused kernel ({reason}), so updates take longer; it needs Triton "
        "and a C compiler (apt-get install gcc)",
        stacklevel=2,
    )
    return False


def rounded(exact: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values in place to one of the two neighbouring bf16 values; the result stays fp32.

    fp32 is bf16 with 16 more bits behind it, so adding `bits` and truncating those 16 bits rounds the value. `bits` are
    int32 from 0 to 65535; with random bits the nearer neighbour is more likely.
    """
    return exact.view(torch.int32).add_(bits).bitwise_and_(-65536).view(torch.float32)


def to_nearest(exact: Tensor) -> Tensor:
    """Compute the bits with which `rounded` rounds like a cast to bf16.

    A real cast is no option: torch.compile removes a cast that the next operation undoes, so that the rounding error
    would be 0 (seen with torch 2.13).
    """
    # plus the last bit that is kept, so that a value half-way between two goes to the even one
    return (exact.view(torch.int32) >> 16).bitwise_and_(1).add_(0x7FFF)


def first_hash(start: int, salt: int) -> int:
    """Compute the argument of `random_bits` for index `start` of a weight, modulo 2**32 as int32."""
    return _signed((start * _GOLDEN + salt) % 2**32)


def random_bits(hashed: int, like: Tensor) -> Tensor:
    """Generate 16 random bits, as int32, for consecutive indices from that of `first_hash`: (like.numel(),).

    The bits are on like's device. They repeat after 2**32 indices.
    """
    places = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    bits = places.mul_(_signed(_GOLDEN)).add_(hashed)
    # Shifts of int32 repeat the sign, where MurmurHash3's shift in zeros: x and ~x get the same bits, which are
    # uniform all the same.
    for shift, factor in ((16, _FIRST), (13, _SECOND)):
        bits.bitwise_xor_(bits >> shift).mul_(_signed(factor))
    return bits.bitwise_xor_(bits >> 16).bitwise_and_(0xFFFF)


def _signed(value: int) -> int:
    """Reinterpret an unsigned 32-bit integer as int32."""
    return value - 2**32 if value >= 2**31 else value


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> AdamWBf16:
    """See build_optimizer."""
    return AdamWBf16(
        groups, settings.learning_rate, settings.betas, settings.epsilon, seed, settings.bf16_rounding == "kahan"
    )
