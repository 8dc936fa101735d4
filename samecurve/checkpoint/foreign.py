"""What a checkpoint of another library has to bring for a model: weights by name, and the moments of its optimizer.

No code of a checkpoint runs: its pickles are read by torch's `weights_only`, which refuses what it does not know.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samecurve.errors import CheckpointError
from samecurve.optim.parameter_groups import Roles

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHOWN = 8  # problems in a message


@dataclass
class ForeignCheckpoint:
    """What a checkpoint of another library brings.

    Attributes:
        format: name of the library, for messages.
        weights: full tensors of the trained parameters by Hugging Face name.
        moments: for each of them "exp_avg" and "exp_avg_sq" in its shape; {} without Adam's states.
        step: optimizer steps, those included that were skipped; 0 if unknown.
        updates: of them, those that were applied, by Adam's step counter; 0 without moments.
        settings: of the optimizer for the next update: `lr`, `betas`, `eps`, `weight_decay` of the group that decays
            most, and `undecayed`, the number of groups that do not decay.
        missing: a line for each part that the checkpoint lacks.
    """

    format: str
    folder: Path
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: int = 0
    updates: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Names:
    """The parameters that a checkpoint has to have.

    Attributes:
        shapes: of the trained ones by name, in the model's order.
        aliases: names under which a checkpoint may have each of them: its own, those of tied ones, and peft's.
        known: names of all parameters and buffers; a further weight belongs to another model.
        all_shapes: of all parameters, frozen ones included, in the model's order.
        roles: which of them decay.
    """

    shapes: dict[str, torch.Size]
    aliases: dict[str, list[str]]
    known: set[str]
    all_shapes: dict[str, torch.Size]
    roles: Roles


def check_shapes(checkpoint: ForeignCheckpoint, names: Names) -> None:
    problems = []
    for name, shape in names.shapes.items():
        tensors = {"weight": checkpoint.weights[name], **checkpoint.moments.get(name, {})}
        for kind, tensor in tensors.items():
            if tensor.shape != shape:
                problems.append(f"{name}: {kind} has the shape {tuple(tensor.shape)}, the model's is {tuple(shape)}")
            elif not tensor.isfinite().all():
                problems.append(f"{name}: {kind} has values that are not finite")
    refuse(checkpoint.folder, "does not fit the recipe's model", problems)


def refuse(folder: Path, what: str, problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError("\n".join([f"{folder}: {what}", *(f"  {line}" for line in problems[:_SHOWN] + more)]))


def keys_of(folder: Path, keys: Iterable[str], names: Names) -> dict[str, str]:
    """Find the key of each trained parameter: its name or an alias after one prefix, which is the same for all.

    Raises:
        CheckpointError: a parameter has no key, several prefixes fit, or there are weights that the model lacks.
    """
    keys, first = set(keys), names.aliases[next(iter(names.shapes))]
    prefixes = {key.removesuffix(alias) for key in keys for alias in first if key.endswith(alias)}
    fits, nearest = {}, {}
    for prefix in sorted(prefix for prefix in prefixes if prefix == "" or prefix.endswith(".")):
        chosen = {
            name: prefix + alias
            for name, aliases in names.aliases.items()
            for alias in aliases
            if prefix + alias in keys
        }
        nearest = max(nearest, chosen, key=len)
        if len(chosen) == len(names.shapes):
            fits[prefix] = chosen
    missing = [] if fits else [f"{name}: only in the model" for name in names.shapes if name not in nearest]
    refuse(folder, "does not fit the recipe's model", missing)
    if len(fits) > 1:
        shown = ", ".join(repr(prefix) for prefix in fits)
        raise CheckpointError(f"{folder}: has several sets of weights, with the prefixes {shown}; keep one of them")
    ((prefix, chosen),) = fits.items()
    weights = [key for key in keys if key.startswith(prefix) and key.endswith((".weight", ".bias"))]
    others = [f"{key}: only in the checkpoint" for key in weights if key.removeprefix(prefix) not in names.known]
    refuse(folder, "does not fit the recipe's model", sorted(others))
    return chosen


def load_pickle(path: Path | BytesIO, *classes: Any) -> Any:
    """Read a file of torch.save on the CPU without running code.

    Args:
        classes: those that the file may hold beside tensors and plain values.

    Raises:
        CheckpointError: the file holds others, or cannot be read.
    """
    with torch.serialization.safe_globals(list(classes)):
        try:
            return torch.load(path, map_location="cpu", mmap=isinstance(path, Path) or None, weights_only=True)
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL ([\w.]+)|[Uu]nsupported (?:global|class|operand)[: ]+([\w.]+)", str(error))
            what = next(filter(None, match.groups()), "code") if match else "code"
            raise CheckpointError(
                f"{path}: refused, as reading it would run code ({what}); save the state as tensors and plain values"
            ) from error
        except (RuntimeError, OSError, ValueError, EOFError, KeyError) as error:
            raise CheckpointError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def take_optimizer(checkpoint: ForeignCheckpoint, names: Names, content: Any) -> None:
    """Take Adam's moments of an optimizer's state_dict, whose parameters are numbered, or named as under FSDP."""
    states, groups = (content.get(key) if isinstance(content, dict) else None for key in ("state", "param_groups"))
    if not isinstance(states, dict) or not isinstance(groups, list) or not states:
        checkpoint.missing.append("the optimizer's file has no states")
        return
    if all(isinstance(key, str) for key in states):
        keys = keys_of(checkpoint.folder, states, names)
    else:
        numbers = [number for group in groups for number in group["params"]]
        order = _order(
            checkpoint, names, [len(group["params"]) for group in groups], [states.get(n, {}) for n in numbers]
        )
        keys = {name: number for name, number in zip(order, numbers, strict=True) if name in names.shapes}
    take_states(checkpoint, {name: states.get(key, {}) for name, key in keys.items()}, groups)


def take_states(checkpoint: ForeignCheckpoint, states: dict[str, Any], groups: list[dict]) -> None:
    kinds = {kind for state in states.values() for kind in state}
    if not {"step"} <= kinds | {key for group in groups for key in group} or kinds - {"step"} != {*MOMENTS}:
        listed = ", ".join(sorted(kinds)) or "none"
        checkpoint.missing.append(f"the optimizer is not AdamW (its states: {listed})")
        return
    steps = {float(state.get("step", groups[0].get("step", 0))) for state in states.values()}
    if len(steps) > 1 or any(set(MOMENTS) - set(state) for state in states.values()):
        raise CheckpointError(
            f"{checkpoint.folder}: the optimizer has updated some parameters more often than others (step counters "
            f"{', '.join(f'{step:g}' for step in sorted(steps))}); the recipe trains all of them together"
        )
    checkpoint.updates = int(steps.pop())
    checkpoint.moments = {name: {kind: state[kind] for kind in MOMENTS} for name, state in states.items()}
    decayed = max(groups, key=lambda group: group.get("weight_decay", 0))
    checkpoint.settings = {key: decayed[key] for key in ("lr", "betas", "eps", "weight_decay") if key in decayed}
    checkpoint.settings["undecayed"] = sum(not group.get("weight_decay", 0) for group in groups)


def _order(checkpoint: ForeignCheckpoint, names: Names, sizes: list[int], states: list[dict]) -> list[str]:
    """Find which parameters the numbers of an optimizer's groups stand for.

    torch numbers them in the order in which the groups got them. Known orders are the model's own, and transformers'
    two groups, those that decay first; or last, as in scripts that name the exceptions first.

    Raises:
        CheckpointError: no order fits the shapes of the moments, or several do.
    """
    orders = set()
    for shapes in (names.shapes, names.all_shapes):
        for decayed in (names.roles.decayed, {name for name, shape in shapes.items() if len(shape) > 1}, {*shapes}):
            first = [name for name in shapes if name in decayed]
            second = [name for name in shapes if name not in decayed]
            for parts in ((first, second), (second, first)):
                order = [name for part in parts for name in part]
                fits = [len(part) for part in parts if part] == [size for size in sizes if size]
                if fits and all(
                    state.get("exp_avg", torch.empty(shapes[name])).shape == shapes[name]
                    for name, state in zip(order, states, strict=True)
                ):
                    orders.add(tuple(order))
    if len(orders) != 1:
        why = "several orders of the model's parameters fit" if orders else "no known order of the parameters fits"
        raise CheckpointError(
            f"{checkpoint.folder}: the optimizer's states are numbered, in groups of {sizes}, and {why}; save them by "
            "name (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or go on with the weights alone: "
            "move the optimizer's file away"
        )
    return [*orders.pop()]
