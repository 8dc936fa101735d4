"""The routers of a mixture of experts: which of a model's modules they are, their logits, their loss and their noise.

The noise is drawn as dropout is: it depends on the row and the step, not on the process.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn, rand_like
from torch.overrides import TorchFunctionMode

from samecurve.errors import ConfigurationError
from samecurve.models.flops import num_experts
from samecurve.specs.model_families import families

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COEFFICIENTS = "router_aux_loss_coef", "aux_loss_coef"  # the latter is jetmoe's
_TOP_K = "num_experts_per_tok", "moe_k"  # the latter is ernie4_5_moe's
# Forwards that multiply a router's input by noise, as Mixtral's, or draw among the best experts, as PhiMoE's.
_NOISY = re.compile(r"\.uniform_\(|\bsparsemixer\(")
_MOST_DRAWS = 6  # in one forward; seen: 5


@dataclass(frozen=True)
class RouterSettings:
    """Losses that a model's routers are trained with.

    Attributes:
        kind: sequence or batch, see model.router_loss.
        coefficient: weight of the load-balancing loss.
        z_coefficient: weight of the z-loss; 0 for none.
        top_k: experts per token.
    """

    kind: str
    coefficient: float
    z_coefficient: float
    top_k: int


def settings(wanted: str | None, model: PreTrainedModel) -> RouterSettings | None:
    """Find how a model's routers are trained; None for no router loss.

    The loss is that of transformers, with the coefficient of the config, wherever transformers has a router loss.

    Args:
        wanted: model.router_loss.
        model: the model, also on the meta device.

    Raises:
        ConfigurationError: the model has no routers or no coefficient for the wanted loss, or routers without a loss
            known here, and `wanted` is not off.
    """
    if wanted == "off":
        return None
    config = model.config.get_text_config()
    coefficient, top_k = _first(config, _COEFFICIENTS), _first(config, _TOP_K)
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if not has_loss or not routers(model):
        if wanted is None:
            return None
        text = f"found {wanted}, but transformers has no router loss for a {config.model_type}; remove the key"
        raise ConfigurationError(f"model.router_loss: {text}")
    if coefficient is None or top_k is None or config.model_type in families("other_router_loss"):
        raise ConfigurationError(
            f"model.router_loss: the loss of a {config.model_type}'s routers is not supported, because it is another "
            f"one, or because its config does not give {_COEFFICIENTS[0]} and {_TOP_K[0]}; set it to off to train "
            "without a router loss"
        )
    return RouterSettings(wanted or "sequence", coefficient, getattr(config, "router_z_loss_coef", None) or 0.0, top_k)


def describe(wanted: str | None, model: PreTrainedModel) -> str:
    """Describe the router loss of a mixture of experts for the header and run.json; "" for a dense model."""
    config, loss = model.config.get_text_config(), settings(wanted, model)
    if loss is not None:
        z_loss = f", z-loss x {loss.z_coefficient}" if loss.z_coefficient else ""
        return f"{loss.kind}: load balancing x {loss.coefficient}{z_loss}"
    if num_experts(config) < 2:
        return ""
    return "off" if wanted == "off" else f"off: transformers has none for a {config.model_type}"


def routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """List (module, index of the router's logits in its output), as transformers records them.

    JetMoE's routers of attention are two entries each, as in transformers' own loss.
    """
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits", [])
    specs = recorded if isinstance(recorded, list) else [recorded]
    return [
        (module, spec.index)
        for name, module in model.named_modules()
        for spec in specs
        if isinstance(module, spec.target_class) and (not spec.layer_name or f".{spec.layer_name}." in f".{name}.")
    ]


class RouterRecorder:
    """Keeps the routers' logits of a forward pass.

    Recomputation in the backward pass records nothing: it would keep all recomputed activations alive.
    """

    def __init__(self, model: PreTrainedModel):
        self._logits: list[Tensor] = []
        self._records = False
        self.num_routers = 0
        for module, index in routers(model):
            module.register_forward_hook(partial(self._keep, index))
            self.num_routers += 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in the body, which runs the model once."""
        self._logits, self._records = [], True
        try:
            yield
        finally:
            self._records = False

    def take(self) -> list[Tensor]:
        """Hand over the recorded logits, (sequences * sequence_length, experts) of each router."""
        logits, self._logits = self._logits, []
        assert len(logits) == self.num_routers, "every router runs once in a forward pass"
        return logits

    def _keep(self, index: int, _module: nn.Module, _inputs: tuple, output: tuple) -> None:
        if self._records:
            self._logits.append(output[index])


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


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
            bounds = {"from": 0.0, "to": 1.0, **dict(zip(("from", "to"), args[1:], strict=False)), **(kwargs or {})}
            low, high = bounds["from"], bounds["to"]
            return args[0].copy_(low + (high - low) * next(self._places).uniform(args[0]))
        if func is rand_like:
            return next(self._places).uniform(args[0]).to(args[0].dtype)
        if getattr(func, "__name__", "") in (
            "mul_",
            "__imul__",
        ):  # in place it would change a view of DeepSpeed's backward hooks
            return args[0] * args[1]
        return func(*args, **kwargs or {})


def install_noise(model: PreTrainedModel, add_place: Callable[[str], NoiseSource]) -> None:
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
        if _NOISY.search(forward_source(type(module))):
            places = [add_place(f"{name}:noise {call}") for call in range(_MOST_DRAWS)]
            module.forward = under(partial(KeyedNoise, places), module.forward)


@cache  # a model has few classes and many modules
def forward_source(module_class: type[nn.Module]) -> str:
    """Return the source code of a class's forward; "" for torch's own classes and where there is none."""
    if module_class.__module__.startswith("torch."):  # nn.Dropout calls F.dropout, but is replaced as a module
        return ""
    try:
        return inspect.getsource(module_class.forward)
    except (OSError, TypeError):
        return ""


def under(mode: Callable[[], TorchFunctionMode], forward: Callable) -> Callable:
    """Wrap a forward: each call runs under a new mode."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return forward(*args, **kwargs)

    return changed
