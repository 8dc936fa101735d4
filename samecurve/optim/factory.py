"""Construction of optimizers by name, and the shapes of their states."""

from __future__ import annotations

import importlib
import math
from collections.abc import Container, Mapping, Sequence

import torch

from samecurve.config.schema import Optimizer
from samecurve.errors import ConfigurationError
from samecurve.optim import own
from samecurve.specs.data_names import is_import_path
from samecurve.specs.optimizers import BLOCK_8BIT, OPTIMIZERS, SMALLEST_8BIT


def state_names(
    settings: Optimizer, shapes: Mapping[str, Sequence[int]], matrices: Container[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Name the optimizer states that have their parameter's shape, for every trained parameter.

    `shapes` holds the full shapes; `matrices` are those of parameter_groups.Roles, read for muon alone.
    """
    if settings.name == "adafactor":
        return {name: () if len(shape) > 1 else ("variance",) for name, shape in shapes.items()}
    if is_import_path(settings.name):
        return dict.fromkeys(shapes, own.state_names(settings))
    if settings.name == "muon":
        kept = {True: OPTIMIZERS["muon"].states, False: OPTIMIZERS["adamw"].states}
        return {name: kept[name in matrices] for name in shapes}
    kahan = settings.name == "adamw_bf16" and settings.bf16_rounding == "kahan"
    return dict.fromkeys(shapes, (*OPTIMIZERS[settings.name].states, *(["compensation"] if kahan else [])))


def factor_shapes(settings: Optimizer, shapes: Mapping[str, Sequence[int]]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Compute the full shape of each optimizer state that differs from its parameter's, by (parameter, state)."""
    if settings.name == "adamw_8bit":
        blocks = {name: -(-math.prod(shape) // BLOCK_8BIT) for name, shape in shapes.items()}
        large = [name for name, shape in shapes.items() if math.prod(shape) >= SMALLEST_8BIT]
        return {(name, key): (blocks[name],) for name in large for key in ("absmax1", "absmax2")}
    if settings.name != "adafactor":
        return {}
    factors = {}
    for name, (*others, rows, columns) in ((name, shape) for name, shape in shapes.items() if len(shape) > 1):
        factors[name, "row_var"], factors[name, "col_var"] = (*others, rows, 1), (*others, 1, columns)
    return factors


def build_optimizer(
    groups: list[dict], settings: Optimizer, precision: str = "fp32", seed: int = 0
) -> torch.optim.Optimizer:
    """Build the optimizer `optimizer.name`. Engines set its learning rate before every step.

    Args:
        groups: from parameter_groups.
        settings: the recipe's optimizer.
        precision: the recipe's precision.
        seed: the recipe's seed.
    """
    # imported here, because bitsandbytes is an optional dependency
    module, _, function = OPTIMIZERS[settings.name].builder.partition(":")
    return getattr(importlib.import_module(module), function)(groups, settings, precision, seed)


def adamw(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> torch.optim.AdamW:
    # fused: one kernel for the whole update, on CPUs and GPUs; by default torch uses foreach on a GPU, with one kernel
    # for each operation, and for_loop on a CPU
    kinds = {kind: kind == settings.implementation for kind in ("fused", "foreach")}
    return torch.optim.AdamW(groups, settings.learning_rate, settings.betas, settings.epsilon, **kinds)


def sgd(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> torch.optim.SGD:
    return torch.optim.SGD(groups, settings.learning_rate, settings.momentum)


def check_shards(name: str, shapes: Mapping[str, Sequence[int]], num_shards: int) -> None:
    """Check that shards do not cut an optimizer's blocks, or else the number of shards would change the loss curve.

    Args:
        name: optimizer.name.
        shapes: full parameter shapes by name; shards are cut along the first dimension.
        num_shards: the number of shards of each parameter.

    Raises:
        ConfigurationError: where a shard would cut a block.
    """
    if name != "adamw_8bit":
        return
    for parameter, (rows, *others) in shapes.items():
        # FSDP2 cuts with torch.chunk, whose chunks have ceil(rows / shards) rows as long as there are any
        size = -(-rows // num_shards) * math.prod(others)
        if rows * math.prod(others) >= SMALLEST_8BIT and size % BLOCK_8BIT:
            raise ConfigurationError(
                f"optimizer.name: found adamw_8bit, which {OPTIMIZERS[name].whole}, but each of {num_shards} shards of "
                f"{parameter} {(rows, *others)} has {size} values, not a multiple of {BLOCK_8BIT}; use another "
                "number of processes, configs/ddp.yaml, or adamw"
            )
