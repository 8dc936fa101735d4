"""Parameter groups, construction of optimizers by name, and the shapes of their states."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from samecurve.config.schema import Optimizer
from samecurve.optim.adafactor import Adafactor
from samecurve.optim.adamw_bf16 import AdamWBf16
from samecurve.optim.lion import Lion
from samecurve.optim.muon import Muon
from samecurve.specs.optimizers import BLOCK_8BIT, OPTIMIZERS, SMALLEST_8BIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def state_names(
    settings: Optimizer, shapes: Mapping[str, Sequence[int]], matrices: Container[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Name the optimizer states that have their parameter's shape, for every trained parameter.

    `shapes` holds the full shapes; for `matrices` see hidden_matrices.
    """
    if settings.name == "adafactor":
        return {name: () if len(shape) > 1 else ("variance",) for name, shape in shapes.items()}
    if settings.name == "muon":
        kept = {True: OPTIMIZERS["muon"].states, False: OPTIMIZERS["adamw"].states}
        return {name: kept[name in matrices] for name in shapes}
    return dict.fromkeys(shapes, (*OPTIMIZERS[settings.name].states, *(["compensation"] if _kahan(settings) else [])))


def _kahan(settings: Optimizer) -> bool:
    return settings.name == "adamw_bf16" and settings.bf16_rounding == "kahan"


def factor_shapes(settings: Optimizer, shapes: Mapping[str, Sequence[int]]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Compute the full shape of each optimizer state that differs from its parameter's, by (parameter, state)."""
    if settings.name == "adamw_8bit":
        blocks = {name: -(-math.prod(shape) // BLOCK_8BIT) for name, shape in shapes.items()}
        large = [name for name, shape in shapes.items() if math.prod(shape) >= SMALLEST_8BIT]
        return {(name, key): (blocks[name],) for name in large for key in ("absmax1", "absmax2")}
    if settings.name != "adafactor":
        return {}
    found = {}
    for name, (*others, rows, columns) in ((name, shape) for name, shape in shapes.items() if len(shape) > 1):
        found[name, "row_var"], found[name, "col_var"] = (*others, rows, 1), (*others, 1, columns)
    return found


def num_bytes_per_parameter(settings: Optimizer) -> float:
    """Bytes per parameter for weight, gradient and optimizer state of a large matrix, unsharded and not offloaded."""
    if settings.name == "adamw_8bit":
        # fp32 weight and gradient; a moment is one byte per value and one fp32 scale per block
        return 4 * 2 + 2 * (1 + 4 / BLOCK_8BIT)
    if settings.name == "adamw_bf16":
        return 2 * (4 + _kahan(settings))
    return 4 * (2 + len(OPTIMIZERS[settings.name].states))


def hidden_matrices(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Find the names of the matrices that map features to features: no embeddings, output head, norms or biases.

    `shapes` holds the shapes of the model's trained parameters by name.
    """
    edges = {id(module) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    edges.add(id(model.get_output_embeddings()))
    owned = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if id(module) in edges
        for name, _ in module.named_parameters()
    }
    return {name for name, shape in shapes.items() if len(shape) == 2 and name not in owned}


def cast_weights(model: PreTrainedModel, settings: Optimizer) -> PreTrainedModel:
    """Cast the weights, in place, to bf16 for adamw_bf16; other optimizers keep fp32. Buffers are not changed."""
    if settings.name == "adamw_bf16":
        # not model.to, which would also round buffers, such as the frequencies of rotary embeddings
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def is_decayed(shape: Iterable[int]) -> bool:
    """Whether weight decay applies to a parameter of this shape: matrices and embeddings, not norms and biases."""
    return len(tuple(shape)) >= 2


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    shapes: dict[str, torch.Size],
    settings: Optimizer,
    matrices: Container[str] = (),
) -> list[dict]:
    """Build non-empty parameter groups with and without weight decay; muon's matrices are a separate, decayed group.

    Args:
        named_parameters: the model's parameters; frozen ones are left out.
        shapes: full shape by Hugging Face name, used because a sharded parameter's own shape may be anything.
        settings: the recipe's optimizer.
        matrices: see hidden_matrices; used only by muon.
    """
    groups: dict[tuple[bool, bool], dict] = {(True, True): {}, (True, False): {}, (False, False): {}}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[is_decayed(shapes[name]), settings.name == "muon" and name in matrices][name] = parameter
    found = []
    for (decay, muon), named in groups.items():
        group = {"params": [*named.values()], "weight_decay": settings.weight_decay if decay else 0.0}
        own = {"muon": {"muon": muon}, "adamw_bf16": {"names": [*named]}}.get(settings.name, {})
        found += [group | own] if named else []
    return found


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
    rate, betas = settings.learning_rate, settings.betas
    if settings.name == "lion":
        return Lion(groups, rate, betas)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum)
    if settings.name == "adafactor":
        return Adafactor(groups, rate)
    if settings.name == "muon":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return Muon(groups, rate, settings.momentum, betas, settings.epsilon, dtype)
    if settings.name == "adamw_bf16":
        return AdamWBf16(groups, rate, betas, settings.epsilon, seed, _kahan(settings))
    if settings.name == "adamw_8bit":
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it warns about missing GPU features
        from samecurve.optim.adamw_8bit import AdamW8bit  # bitsandbytes is an optional dependency

        return AdamW8bit(groups, lr=rate, betas=betas, eps=settings.epsilon, min_8bit_size=SMALLEST_8BIT)
    # fused: one kernel for the whole update, on CPUs and GPUs; by default torch uses foreach on a GPU, with one kernel
    # for each operation, and for_loop on a CPU
    kinds = {kind: kind == settings.implementation for kind in ("fused", "foreach")}
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=settings.epsilon, **kinds)
