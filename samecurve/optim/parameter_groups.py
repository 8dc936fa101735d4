"""Which weights decay and which of them Muon takes, by their module and name: the same under every strategy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from samecurve.config.schema import Optimizer
from samecurve.config.schema_training import ParameterGroup
from samecurve.specs.optimizers import RECURRENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers' Trainer.get_decay_parameter_names: biases of any rank, and norms whatever their class. It searches the
# whole name, and so leaves all of roberta-prelayernorm and the attention of dbrx (norm_attn_norm) without decay; here
# the name of the weight and that of its module count.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|[._])scale$")


class Roles(NamedTuple):
    """The roles of a model's weights in an optimizer, by Hugging Face name.

    Attributes:
        decayed: matrices, embeddings, convolutions and stacks of experts; no vectors, norms, scales, biases or
            parameters of a recurrence.
        matrices: those that map features to features, each alone or in a stack of experts (experts, rows, columns); no
            embeddings, output head or convolutions, and none with a single row.
        rate_factors: LoRA+ (arXiv:2402.12354), of the weights with another learning rate than the others. These are
            those of peft's create_loraplus_optimizer: B matrices and vectors.
    """

    decayed: frozenset[str]
    matrices: frozenset[str]
    rate_factors: Mapping[str, float] = {}

    def describe(self, settings: Optimizer, shapes: Mapping[str, Sequence[int]]) -> str:
        """Say which weights Muon takes, or have LoRA+'s rate; "" for none. `shapes`: of the trained weights."""
        if fast := [math.prod(shape) for name, shape in shapes.items() if name in self.rate_factors]:
            times = max(self.rate_factors.values())
            return f"LoRA+: {times:g} times the learning rate for {len(fast):,} weights ({sum(fast):,} parameters)"
        if settings.name != "muon":
            return ""
        stacks = sum(len(shape) == 3 for name, shape in shapes.items() if name in self.matrices)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        taken = [size for name, size in sizes.items() if name in self.matrices]
        within = f", {stacks} of them stacks that are orthogonalized expert by expert" if stacks else ""
        rest = f"{len(sizes) - len(taken):,} others (embeddings, output head, vectors, biases, convolutions)"
        return f"muon for {len(taken):,} hidden weights ({sum(taken):,} parameters{within}), adamw for {rest}"


def describe_groups(model: PreTrainedModel, settings: Optimizer) -> list[str]:
    """Say for each of the recipe's groups, and for the rest, what it is and how many parameters it has.

    An adapter's frozen weights are in none.
    """
    members: dict[ParameterGroup | None, list[int]] = {}
    for name, parameter in model.named_parameters() if settings.groups else ():
        group = settings.group_of(name)
        if parameter.requires_grad or (group is not None and group.frozen):
            members.setdefault(group, []).append(parameter.numel())
    lines = []
    for group in (*settings.groups, None):
        if sizes := members.get(group):
            decay = settings.weight_decay if group is None or group.weight_decay is None else group.weight_decay
            how = f"learning rate {settings.learning_rate * rate_factor(group, settings):g}, weight decay {decay:g}"
            how = "frozen" if group and group.frozen else how
            counted = f"{len(sizes):,} weights, {sum(sizes):,} parameters"
            lines.append(f"{group.pattern if group else 'all others'}: {how} ({counted})")
    return lines


def rate_factor(group: ParameterGroup | None, settings: Optimizer) -> float:
    """Compute a group's learning rate relative to `optimizer.learning_rate`, see schedule.set_learning_rate."""
    return 1.0 if group is None or group.learning_rate is None else group.learning_rate / settings.learning_rate


def roles_of(model: PreTrainedModel) -> Roles:
    """Find the roles of a whole model's weights; the model may be on the meta device."""
    decayed, matrices = set(), set()
    # modules between features and tokens or classes: embeddings and the output head
    edges: set[nn.Module] = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        edges.add(head)
    elif hasattr(model, model.base_model_prefix):  # a classifier's last layer is its head
        inside = set(getattr(model, model.base_model_prefix).modules())
        linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
        edges.update([module for module in linear if module not in inside][-1:])
    ratio = vars(model).get("loraplus_lr_ratio")
    fast = {name: ratio for name, p in model.named_parameters() if ratio and (".lora_B." in name or p.dim() == 1)}
    for prefix, module in model.named_modules():
        kind = type(module).__name__
        for own, weight in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            is_norm = "Norm" in kind and not isinstance(module, nn.Linear | nn.Embedding)
            # RWKV's time_mix_key is (1, 1, features)
            is_vector = weight.dim() < 2 or (own != "weight" and weight.numel() == max(weight.shape))
            named = f"{prefix.rpartition('.')[2]}.{own}".lower()
            if is_vector or is_norm or own in RECURRENT or _UNDECAYED.search(named):
                continue
            decayed.add(name)
            if module in edges:
                continue
            # dbrx keeps its experts, and deepseek_v4 its groups of heads, below each other in one matrix, which is none
            # to orthogonalize; neither is a single row, such as the gate of a shared expert
            is_stack = "Expert" in kind
            if "Grouped" in kind or min(weight.shape[-2:]) < 2:
                continue
            if weight.dim() == 3 if is_stack else weight.dim() == 2 and own == "weight":
                matrices.add(name)
    return Roles(frozenset(decayed), frozenset(matrices), fast)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    settings: Optimizer,
    roles: Roles,
    others: Iterable[str] = (),
) -> list[dict]:
    """Build parameter groups: decayed ones first, muon's matrices before those of AdamW, then by the recipe.

    A group whose learning rate is not the schedule's has a `rate_factor`, see schedule.set_learning_rate.

    Args:
        named_parameters: the parameters that this rank has, by Hugging Face name; frozen ones are left out.
        settings: the recipe's optimizer.
        roles: of the whole model's weights, because a shard's own shape may be anything.
        others: names of trained parameters of other ranks, whose groups are made, too, empty where nothing is here.
    """

    def key(name: str) -> tuple[bool, bool, int, float]:
        group = settings.group_of(name)
        place = -1 if group is None else settings.groups.index(group)
        rated = group is not None and group.learning_rate is not None
        factor = rate_factor(group, settings) if rated else roles.rate_factors.get(name, 1.0)
        return name not in roles.decayed, settings.name != "muon" or name not in roles.matrices, place, factor

    groups: dict[tuple[bool, bool, int, float], dict[str, nn.Parameter]] = {key(name): {} for name in others}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups.setdefault(key(name), {})[name] = parameter
    made = []
    for (undecayed, no_muon, place, factor), named in sorted(groups.items(), key=lambda item: item[0]):
        own = settings.groups[place].weight_decay if place >= 0 else None
        decay = settings.weight_decay if own is None else own
        group = {"params": [*named.values()], "weight_decay": 0.0 if undecayed else decay}
        group |= {"rate_factor": factor} if factor != 1.0 else {}
        made.append(group | {"muon": {"muon": not no_muon}, "adamw_bf16": {"names": [*named]}}.get(settings.name, {}))
    return made
