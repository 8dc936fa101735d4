"""Which weights decay and which of them Muon takes, by their module and name: the same under every strategy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from samecurve.config.schema import Optimizer
from samecurve.specs.model_families import RECURRENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers' Trainer.get_decay_parameter_names: biases of any rank, and norms whatever their class
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class Roles(NamedTuple):
    """The roles of a model's weights in an optimizer, by Hugging Face name.

    Attributes:
        decayed: matrices, embeddings, convolutions and stacks of experts; no vectors, norms, biases or parameters of a
            recurrence.
        matrices: those that map features to features, each alone or in a stack of experts (experts, rows, columns); no
            embeddings, output head or convolutions.
    """

    decayed: frozenset[str]
    matrices: frozenset[str]

    def describe(self, settings: Optimizer, shapes: Mapping[str, Sequence[int]]) -> str:
        """Say which trained weights Muon takes; "" for another optimizer. `shapes`: of the trained weights by name."""
        if settings.name != "muon":
            return ""
        stacks = sum(len(shape) == 3 for name, shape in shapes.items() if name in self.matrices)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        taken = [size for name, size in sizes.items() if name in self.matrices]
        within = f", {stacks} of them stacks that are orthogonalized expert by expert" if stacks else ""
        rest = f"{len(sizes) - len(taken):,} others (embeddings, output head, vectors, biases, convolutions)"
        return f"muon for {len(taken):,} hidden weights ({sum(taken):,} parameters{within}), adamw for {rest}"


def roles_of(model: PreTrainedModel) -> Roles:
    """Find the roles of a whole model's weights; the model may be on the meta device."""
    decayed, matrices, edges = set(), set(), _edges(model)
    for prefix, module in model.named_modules():
        kind = type(module).__name__
        for own, weight in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            if weight.dim() < 2 or own in RECURRENT or "Norm" in kind or _UNDECAYED.search(name.lower()):
                continue
            decayed.add(name)
            if module in edges:
                continue
            # dbrx keeps its experts below each other in one matrix, which is none to orthogonalize
            is_stack = "Expert" in kind
            if weight.dim() == 3 if is_stack else weight.dim() == 2 and own == "weight":
                matrices.add(name)
    return Roles(frozenset(decayed), frozenset(matrices))


def _edges(model: PreTrainedModel) -> set[nn.Module]:
    """Find the modules between features and tokens or classes: embeddings and the output head."""
    edges: set[nn.Module] = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is None and hasattr(model, model.base_model_prefix):  # a classifier's last layer is its head
        inside = set(getattr(model, model.base_model_prefix).modules())
        behind = [
            module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module not in inside
        ]
        head = behind[-1] if behind else None
    return edges | ({head} if head is not None else set())


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: Optimizer, roles: Roles
) -> list[dict]:
    """Build non-empty parameter groups with and without weight decay; muon's matrices are a separate, decayed group.

    Args:
        named_parameters: the parameters that this rank has, by Hugging Face name; frozen ones are left out.
        settings: the recipe's optimizer.
        roles: of the whole model's weights, because a shard's own shape may be anything.
    """
    groups: dict[tuple[bool, bool], dict] = {(True, True): {}, (True, False): {}, (False, False): {}}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[name in roles.decayed, settings.name == "muon" and name in roles.matrices][name] = parameter
    made = []
    for (decay, muon), named in groups.items():
        group = {"params": [*named.values()], "weight_decay": settings.weight_decay if decay else 0.0}
        own = {"muon": {"muon": muon}, "adamw_bf16": {"names": [*named]}}.get(settings.name, {})
        made += [group | own] if named else []
    return made
