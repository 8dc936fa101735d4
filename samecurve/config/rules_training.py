"""Rules on how a model is trained that involve more than one recipe key: optimizer, memory, speed, profile, logging."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from samecurve.config.documents import Finding, describe, joined
from samecurve.config.schema import Memory, Optimizer
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.specs.data_names import is_import_path
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.specs.trackers import TRACKERS

# rounding to bf16 moves a number by up to 2 ** -9 of itself, 0.2 %; a mean has to move by more than that
LARGEST_BF16_BETA = 0.99


def _optimizer(value: Callable[[str], Any]) -> Iterator[Finding]:
    name = value("optimizer.name")
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "optimizer.name", f"found {name}, which needs the package bitsandbytes; run pip install bitsandbytes"
    elif name == "adamw_bf16" and value("precision") != "bf16":
        text = f"found adamw_bf16, which trains bf16 weights, but precision is {value('precision')}; set that to bf16"
        yield "optimizer.name", f"{text}, or use another optimizer"
    elif name == "muon" and (adapter := value("adapter.name")):
        text = f"found muon, which orthogonalizes a model's hidden matrices, but adapter.name is {adapter}"
        yield "optimizer.name", f"{text}, which freezes them; use adamw"


def _idle_optimizer(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A key has no effect because the optimizer does not use it."""
    name, given = value("optimizer.name"), value(f"optimizer.{key}")
    default = Optimizer.model_fields[key].default
    # YAML has lists where the schema's defaults are tuples
    if key not in OPTIMIZERS[name].reads and (tuple(given) if isinstance(given, list) else given) != default:
        readers = [other for other, spec in OPTIMIZERS.items() if key in spec.reads]
        use = f"{joined(readers, 'and')} {'use' if len(readers) > 1 else 'uses'}"
        text = f"found {describe(given)}, but only {use} it and optimizer.name is {name}; remove it"
        yield f"optimizer.{key}", text


def _optimizer_options(value: Callable[[str], Any]) -> Iterator[Finding]:
    name, given = value("optimizer.name"), value("optimizer.options")
    if given and not is_import_path(name):
        text = f"found {', '.join(given)}, but only an optimizer that is named by its import path takes options and "
        yield "optimizer.options", f"{text}optimizer.name is {name}; use the keys of optimizer"
    if taken := {"lr", "weight_decay", "params"} & set(given):
        text = f"found {', '.join(sorted(taken))}, which the recipe sets; use optimizer.learning_rate and "
        yield "optimizer.options", f"{text}optimizer.weight_decay"


def _bf16_mean(value: Callable[[str], Any]) -> Iterator[Finding]:
    second = value("optimizer.betas")[1]
    if value("optimizer.name") == "adamw_bf16" and second > LARGEST_BF16_BETA:
        text = f"found {second:g}, but adamw_bf16 keeps its moments in bf16, where rounding undoes changes of "
        yield "optimizer.betas", f"{text}{1 - second:.2g} of a value; use at most {LARGEST_BF16_BETA:g}, or adamw"


def _groups(value: Callable[[str], Any]) -> Iterator[Finding]:
    """A group that changes nothing, or that sets for frozen parameters what they do not have."""
    for place, group in enumerate(value("optimizer.groups")):
        given = [key for key in ("learning_rate", "weight_decay") if group.get(key) is not None]
        text = f"the group of {group['pattern']!r} "
        if group.get("frozen") and given:
            text += f"is frozen, which leaves {joined(given, 'and')} without effect; remove one of them"
        elif not group.get("frozen") and not given:
            text += "sets nothing; give it learning_rate, weight_decay or frozen: true"
        else:
            continue
        yield f"optimizer.groups.{place}.pattern", text


_OPTIMIZER = (
    *(_optimizer, _optimizer_options, _bf16_mean, _groups),
    *(partial(_idle_optimizer, key) for key in sorted({key for spec in OPTIMIZERS.values() for key in spec.reads})),
)


def _idle_memory(key: str, reader: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    kind, given = value("memory.activation_checkpointing"), value(f"memory.{key}")
    if kind != reader and given != Memory.model_fields[key].default:
        text = f"found {given}, but only {reader} uses it and memory.activation_checkpointing is {kind}"
        yield f"memory.{key}", f"{text}; remove it"


def _offload_compiled(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("compile") == "full" and value("memory.activation_checkpointing") == "offload":
        text = "found full, but memory.activation_checkpointing: offload copies to host memory in every layer, "
        yield "compile", f"{text}which breaks the compiled graph; use regional"


def _fp8(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("fp8") or "off"
    if kind != "off" and importlib.util.find_spec("torchao") is None:
        yield "fp8", f"found {kind}, which needs the package torchao; run pip install torchao, or use off"
    if kind != "off" and value("precision") != "bf16":
        text = f"found {kind}, which needs bf16, but precision is {value('precision')}"
        yield "fp8", f"{text}; set precision to bf16, or use off"


def _fp8_of_quantized(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("fp8") or "off"
    if kind != "off" and value("adapter.quantization") is not None:
        yield (
            "fp8",
            f"found {kind}, but quantized weights (adapter.quantization) have their own products; use off",
        )


def _liger(key: str, instead: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value(key) == "liger" and importlib.util.find_spec("liger_kernel") is None:
        yield key, f"found liger, which needs the package liger-kernel; run pip install liger-kernel, or use {instead}"


def _rotated_twice(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Liger's rotary embedding overwrites saved tensors without autograd noticing.

    Seen with liger-kernel 0.8.5: it writes into the projections' results, so a saved result is rotated again when the
    layer is recomputed. The loss stays the same and the gradients are wrong (tests/unit/test_liger.py).
    """
    selective = value("memory.activation_checkpointing") == "selective"
    if value("model.kernels") == "liger" and selective and value("memory.selective_save") == "matmul":
        yield (
            "model.kernels",
            "found liger, which rotates queries and keys in place, but memory.selective_save: matmul keeps them and "
            "would rotate them twice; set that to attention, change memory.activation_checkpointing, or use torch",
        )


MEMORY_RULES = (
    partial(_idle_memory, "selective_save", "selective"),
    partial(_idle_memory, "every_n_layers", "every_n_layers"),
    *(_offload_compiled, _fp8, _fp8_of_quantized),
    partial(_liger, "model.kernels", "torch"),
    partial(_liger, "loss.implementation", "auto"),
    _rotated_twice,
)


def _profile_steps(value: Callable[[str], Any]) -> Iterator[Finding]:
    first, last = value("profile.steps") or (1, 1)
    if first > last:
        yield "profile.steps", f"found [{first}, {last}], but the first step comes after the last one; swap them"
    elif last > value("steps"):
        yield "profile.steps", f"found [{first}, {last}], but steps is {value('steps')}; end at that step or earlier"


def check_ranks(source: RecipeSource, world_size: int) -> None:
    """Add a problem for a rank in profile.ranks that does not exist."""
    with contextlib.suppress(InvalidValue):
        absent = [rank for rank in source.value("profile.ranks") if rank >= world_size]
        if absent:
            known = f"{world_size} processes have ranks 0 to {world_size - 1}"
            known = known if world_size > 1 else "1 process has rank 0"
            text = f"found {absent[0]}, but {known} only; remove the others"
            source.document.problem(("profile", "ranks"), text)


def _trackers(value: Callable[[str], Any]) -> Iterator[Finding]:
    names = list(value("logging.trackers"))
    for name in names:
        module, package = TRACKERS.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            text = f"found {name}, but the package {package} is not installed; run pip install {package}, or remove it"
            yield "logging.trackers", text
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield "logging.trackers", f"names {', '.join(repeated)} more than once; name each tracker once"


RULES = (*_OPTIMIZER, *MEMORY_RULES, _profile_steps, _trackers)
