"""An optimizer of the user's own: a subclass of torch.optim.Optimizer that a recipe names by import path.

A checkpoint stores, for each weight, states of the weight's shape, and the number of updates. What an optimizer keeps,
and whether it can go on from that, is tried on two small weights before the model is built.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samecurve.config import own_code
from samecurve.config.documents import joined
from samecurve.config.schema import Optimizer
from samecurve.errors import ConfigurationError

COUNTER = "step"
_TOLERANCE = 1e-5  # of a weight: other kernels may compute parts of a tensor
_TRIED: dict[str, Trial] = {}


class Trial(NamedTuple):
    """What an optimizer did to small weights.

    Attributes:
        states: names of its states of each weight, which have the weight's shape.
        counter: its state `step` after no update, a tensor or a number; None without one.
        is_elementwise: whether each value is updated by its own gradient and states alone, so that shards can be.
    """

    states: tuple[str, ...]
    counter: Tensor | float | None
    is_elementwise: bool


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> torch.optim.Optimizer:
    """See build_optimizer."""
    optimizer, trial = _construct(groups, settings), _trial(settings)

    def empty_state(weight: Tensor) -> dict:
        counter = trial.counter.clone() if isinstance(trial.counter, Tensor) else trial.counter
        state = {} if counter is None else {COUNTER: counter}
        return state | {name: torch.zeros_like(weight) for name in trial.states}

    # samecurve/accelerator/sharded_state.py creates the states of a weight before its first update
    optimizer.empty_state = empty_state  # type: ignore[attr-defined]
    return optimizer


def state_names(settings: Optimizer) -> tuple[str, ...]:
    """Name the states that have their weight's shape. Raises ConfigurationError for others, see `check`."""
    return _trial(settings).states


def check(settings: Optimizer, shards: bool) -> None:
    """Try the optimizer on small weights.

    Args:
        settings: the recipe's optimizer.
        shards: whether ranks keep and update parts of a weight.

    Raises:
        ConfigurationError: it cannot be built, a checkpoint could not store its state, or it cannot update shards.
    """
    if not _trial(settings).is_elementwise and shards:
        raise _refusal(
            settings,
            "updates the parts of a weight otherwise than the whole, so the curve would depend on the number of "
            "processes; use configs/ddp.yaml",
        )


def _trial(settings: Optimizer) -> Trial:
    key = settings.model_dump_json()
    if key not in _TRIED:
        # an optimizer that draws noise must not change what the run draws
        with torch.random.fork_rng(devices=[]):
            _TRIED[key] = _try(settings)
    return _TRIED[key]


def _try(settings: Optimizer) -> Trial:
    draw = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (5,))
    values, *gradients = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(4))
    try:
        whole = _updated(settings, values, gradients[:1])
    except ConfigurationError:
        raise
    except Exception as error:  # of any type: this runs the user's code
        text = f"failed with {type(error).__name__} in its first step, on weights of shapes (6, 4) and (5,): {error}"
        raise _refusal(settings, text) from error
    states, counter = _states(settings, whole)
    before = [{**whole.state[weight]} for weight in _weights(whole)]
    before = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()} for state in before]
    halfway = [weight.detach().clone() for weight in _weights(whole)]
    groups = _settings_of(whole)
    _update(whole, gradients[1:])
    expected = [weight.detach() for weight in _weights(whole)]
    if _settings_of(whole) != groups:
        raise _refusal(settings, "changes settings of its parameter groups, which a checkpoint does not store")
    # another one that goes on from the checkpoint's states, as a resumed run does
    resumed = _construct([{"params": halfway, "weight_decay": settings.weight_decay}], settings)
    resumed.state.clear()
    for weight, state in zip(_weights(resumed), before, strict=True):
        resumed.state[weight] = state
    _update(resumed, gradients[1:])
    if not _close(_weights(resumed), expected):
        raise _refusal(
            settings,
            f"does not go on from {joined([*states, COUNTER], 'and')} alone: it keeps something else, which a "
            "checkpoint does not store; keep it in self.state[weight]",
        )
    halves = [half for tensor in values for half in tensor.tensor_split(2)]
    cut = [[half for tensor in step for half in tensor.tensor_split(2)] for step in gradients]
    parts = _weights(_updated(settings, halves, cut))
    joint = [torch.cat(parts[start : start + 2]) for start in range(0, len(parts), 2)]
    return Trial(states, counter, _close(joint, expected))


def _construct(groups: list[dict], settings: Optimizer) -> torch.optim.Optimizer:
    optimizer_class = own_code.load(settings.name, "optimizer.name")
    own_code.check_subclass(settings.name, "optimizer.name", optimizer_class, torch.optim.Optimizer)
    try:
        optimizer = optimizer_class(groups, lr=settings.learning_rate, **settings.options)
    except (TypeError, ValueError) as error:
        raise _refusal(settings, f"does not take lr and optimizer.options: {error}") from error
    if settings.weight_decay and "weight_decay" not in optimizer.defaults:
        raise ConfigurationError(
            f"optimizer.weight_decay: found {settings.weight_decay:g}, but {settings.name} has no weight_decay among "
            "its defaults and would not apply it; set it to 0"
        )
    if "lr" not in optimizer.defaults:
        raise _refusal(settings, 'has no "lr" among its defaults, where the schedule sets the learning rate')
    return optimizer


def _updated(settings: Optimizer, values: list[Tensor], gradients: list[list[Tensor]]) -> torch.optim.Optimizer:
    weights = [value.clone().requires_grad_() for value in values]
    optimizer = _construct([{"params": weights, "weight_decay": settings.weight_decay}], settings)
    _update(optimizer, gradients)
    return optimizer


def _update(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for weight, gradient in zip(_weights(optimizer), step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def _states(settings: Optimizer, optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], Tensor | float | None]:
    """Return names and counter of a Trial from an optimizer after one update."""
    first, *others = ({**optimizer.state[weight]} for weight in _weights(optimizer))
    for weight, state in zip(_weights(optimizer), (first, *others), strict=True):
        for name, value in state.items():
            is_counter = name == COUNTER and float(value) == 1
            if not is_counter and getattr(value, "shape", None) != weight.shape:
                shown = f"a tensor of shape {(*value.shape,)}" if isinstance(value, Tensor) else repr(value)
                raise _refusal(
                    settings,
                    f"keeps {name} = {shown} for a weight of shape {(*weight.shape,)} after one update, but a "
                    f"checkpoint stores states of the weight's shape and the number of updates, {COUNTER}",
                )
    if any(state.keys() != first.keys() for state in others):
        raise _refusal(settings, "keeps other states for a vector than for a matrix")
    counter = first.get(COUNTER)
    if counter is not None:
        counter = counter.clone().zero_() if isinstance(counter, Tensor) else 0
    return tuple(name for name in first if name != COUNTER), counter


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _close(weights: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(weights, expected, strict=True)
    return all(torch.allclose(weight.detach(), other, rtol=_TOLERANCE, atol=1e-7) for weight, other in pairs)


def _refusal(settings: Optimizer, text: str) -> ConfigurationError:
    return ConfigurationError(f"optimizer.name: {settings.name} {text}")
