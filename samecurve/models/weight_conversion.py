"""Which stored tensors make which parameters of a model, and the other way round, by transformers' own rules.

transformers 5 stores some families otherwise than it computes with them: a GPT-NeoX's `lm_head.weight` is `embed_out`
in the file, a Mixtral's experts are one parameter here and a tensor for each expert there. Its rules, of its modules
conversion_mapping and core_model_loading, have no public interface for less than a whole model. All of ours that
touches them is in this module; seen with transformers 5.17 and 5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import __version__ as transformers_version

from samecurve.errors import ConfigurationError

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
except ImportError as moved:
    raise ConfigurationError(
        f"transformers {transformers_version}: its rules for stored weights are not where samecurve looks for them "
        f"({moved}); install a version that constraints.txt or requirements.txt names"
    ) from moved

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Group:
    """Stored tensors that have to be read together, and the parameters that they make; nearly always one and one.

    sources: for each stored name the pattern of the rule that takes it. made: shapes of the parameters by name.
    problem: why nothing can be made of them, "" where something can.
    """

    sources: dict[str, str]
    made: dict[str, torch.Size]
    problem: str = ""
    _first: str = ""
    _rule: Any = field(default=None, repr=False)
    _model: Any = field(default=None, repr=False)

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters by name. tensors: those of `sources`; the dictionary is emptied, to hold nothing twice."""
        if self._rule is None:
            return {self._first: tensors.pop(next(iter(self.sources)))}
        rule = copy.deepcopy(self._rule)
        for name, pattern in self.sources.items():
            rule.add_tensor(self._first, name, pattern, tensors.pop(name))
        found = rule.convert(self._first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def groups(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[Group]:
    """What the stored tensors make of `model`'s parameters; those that make nothing of it are left out.

    model: on the meta device, without an adapter. shapes: of the stored tensors, by name. The same steps as
    transformers' convert_and_load_state_dict_in_model.
    """
    known, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Group] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # stored under its own name, which a rule happens to fit
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        group = found.get(target)
        if group is None:
            rule = by_pattern[pattern] if pattern else None
            group = found[target] = Group({}, {}, _first=target, _rule=rule, _model=model)
        if group._rule is not None or not group.sources:  # of two for one name the first is taken
            group.sources[name] = pattern or name
    for group in found.values():
        _rehearse(group, shapes)
    return list(found.values())


def _rehearse(group: Group, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill in `made` and `problem`, without reading a tensor."""
    empty = {name: torch.empty(shapes[name], device="meta") for name in group.sources}
    try:
        group.made = {name: tensor.shape for name, tensor in group.convert(empty).items()}
    except Exception as error:  # experts that are missing, or have other sizes: whatever torch says of that
        group.made, group.problem = {group._first: torch.Size()}, " ".join(str(error).split())


class Storage:
    """How `save_pretrained` stores the parameters of a model. model: on the meta device, without an adapter."""

    def __init__(self, model: PreTrainedModel):
        # PrefixChange: a prefix that a larger model's file has; save_pretrained leaves it out as well
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
        self._converts = bool(rules)
        self._model = copy.copy(model)
        self._model._weight_conversions = rules  # where revert_weight_conversion looks first
        backwards = [rule.reverse_transform() for rule in rules[::-1]]
        self._converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]

    def groups(self, names: list[str]) -> dict[str, tuple[str, ...]]:
        """For each parameter those that are stored together with it, itself among them."""
        found: dict[str, list[str]] = {}
        for name in names:
            target, pattern = rename_source_key(name, [], self._converters, reverse=True)
            found.setdefault(target if pattern else name, []).append(name)
        return {name: tuple(group) for group in found.values() for name in group}

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored tensors by name. tensors: a group's parameters by name."""
        return revert_weight_conversion(self._model, tensors) if self._converts else tensors


def supports(model_class: type[PreTrainedModel], attention: str) -> bool:
    """Whether transformers can compute a family's attention so. attention: sdpa, flex_attention, flash_attention_2."""
    name = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(attention, "_supports_flash_attn")
    assert hasattr(model_class, name), f"transformers {transformers_version} has no {name}"
    return getattr(model_class, name)
