"""Noise of a mixture of experts' routers, drawn as dropout is: it depends on the row and the step, not the process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, rand_like
from torch.overrides import TorchFunctionMode

from samecurve.errors import ConfigurationError
from samecurve.models import forwards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Forwards that multiply a router's input by noise, as Mixtral's, or draw among the best experts, as PhiMoE's.
_NOISY = re.compile(r"\.uniform_\(|\bsparsemixer\(")
_MOST_DRAWS = 6  # in one forward; seen: 5


class NoiseSource(Protocol):
    """Source of numbers between 0 and 1 for one place of the model (models.dropout.DropoutPlace)."""

    def uniform(self, like: Tensor) -> Tensor: ...


class KeyedNoise(TorchFunctionMode):
    """Replaces the random numbers within one module's forward; the n-th draw is that of the n-th place.

    Multiplications in place return a new tensor instead.
    """

    def __init__(self, places: Iterable[NoiseSource]):
        super().__init__()
        self._places = iter(places)

    def __torch_function__(self, func: Callable, types: Sequence, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.exponential_:
            return args[0].copy_(-next(self._places).uniform(args[0]).log())  # finite: `uniform` never draws 0
        if func is Tensor.uniform_:
            low, high = _bounds(*args[1:], **kwargs or {})
            return args[0].copy_(low + (high - low) * next(self._places).uniform(args[0]))
        if func is rand_like:
            return next(self._places).uniform(args[0]).to(args[0].dtype)
        if getattr(func, "__name__", "") in (
            "mul_",
            "__imul__",
        ):  # in place it would change a view of DeepSpeed's backward hooks
            return args[0] * args[1]
        return func(*args, **kwargs or {})


def _bounds(low: float = 0.0, high: float = 1.0, **named: Any) -> tuple[float, float]:
    """Return the bounds of Tensor.uniform_'s arguments, which are called `from` and `to`."""
    return named.get("from", low), named.get("to", high)


def install(model: PreTrainedModel, add_place: Callable[[str], NoiseSource]) -> None:
    """Replace the noise of all routers of a model.

    Args:
        add_place: makes a place by its unique name.

    Raises:
        ConfigurationError: the config has PhiMoE's input_jitter_noise. The router multiplies its input by this noise in
            place, so the experts have to read the noisy input, too, and a multiplication out of place would differ.
    """
    if noise := getattr(model.config, "input_jitter_noise", 0.0):
        raise ConfigurationError(
            f"model.config.input_jitter_noise: found {noise}, but this noise is multiplied in place, which ZeRO-3 does "
            "not allow; set it to 0 and keep router_jitter_noise"
        )
    for name, module in model.named_modules():
        if _NOISY.search(forwards.source(type(module))):
            places = [add_place(f"{name}:noise {call}") for call in range(_MOST_DRAWS)]
            module.forward = forwards.under(partial(KeyedNoise, places), module.forward)
