"""Conversion between stored tensors and a model's parameters by transformers' own rules.

transformers 5 stores some families in another layout than their parameters: a GPT-NeoX's `lm_head.weight` is
`embed_out` in the file, and a Mixtral's experts are one parameter in the model but one tensor per expert in the file.
The rules, in transformers' modules conversion_mapping and core_model_loading, have no public interface for less than a
whole model. All code that depends on them is in this module; tested with transformers 5.17 and 5.23.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import __version__ as transformers_version

from samecurve.errors import ConfigurationError

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        MergeModulelist,
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
except ImportError as moved:
    raise ConfigurationError(
        f"transformers {transformers_version}: its rules for stored weights have moved ({moved}); install a version "
        "that constraints.txt or requirements.txt allows"
    ) from moved

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Group:
    """Stored tensors that are converted together into one or more parameters; nearly always one tensor and parameter.

    Attributes:
        sources: pattern of the matching rule, by stored name.
        made: shapes of the resulting parameters by name.
        problem: reason why the conversion fails, "" if it succeeds.
    """

    sources: dict[str, str]
    made: dict[str, torch.Size]
    problem: str = ""
    _first: str = ""
    _rule: Any = field(default=None, repr=False)
    _model: Any = field(default=None, repr=False)

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of `sources` to parameters by name. Empties `tensors`, to hold nothing twice."""
        if self._rule is None:
            return {self._first: tensors.pop(next(iter(self.sources)))}
        rule = copy.deepcopy(self._rule)  # a rule collects tensors, and other groups have the same one
        for name, pattern in self.sources.items():
            rule.add_tensor(self._first, name, pattern, tensors.pop(name))
        parameters = rule.convert(self._first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in parameters.items()}

    def load(self, read: Callable[[Iterable[str]], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Read and convert to parameters by name.

        Stacked experts become fp32: they are read one after another into their parameter, so that nothing of its size
        is made beside it.

        Args:
            read: reads tensors of `sources` by name.
        """
        operations = [] if self._rule is None else self._rule.operations
        if len(self.made) != 1 or not operations or not isinstance(operations[0], MergeModulelist):
            return self.convert(read(self.sources))
        ((name, shape),) = self.made.items()
        by_pattern: dict[str, list[str]] = {}
        for source, pattern in self.sources.items():
            by_pattern.setdefault(pattern, []).append(source)
        if operations[0].dim != 0 or {len(sources) for sources in by_pattern.values()} != {shape[0]}:
            return self.convert(read(self.sources))
        stack = torch.empty(shape)
        for index, row in enumerate(zip(*by_pattern.values(), strict=True)):
            expert = replace(self, sources=dict(zip(row, by_pattern, strict=True)))
            stack[index] = expert.convert(read(expert.sources))[name][0]
        return {name: stack}


def groups(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Group], dict[str, tuple[str, bool]]]:
    """Group the stored tensors by the parameters that they are converted to.

    The steps are those of transformers' convert_and_load_state_dict_in_model.

    Args:
        model: on the meta device, without an adapter.
        shapes: the stored tensors' shapes by name.

    Returns:
        The groups, and by its stored name each tensor that the model does not have: (the name that transformers looks
        for, whether its from_pretrained skips the tensor without a warning).
    """
    known, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    # as PreTrainedModel._adjust_missing_and_unexpected_keys, which has the two names of buffers for all families
    skipped = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    unused: dict[str, tuple[str, bool]] = {}
    by_target: dict[str, Group] = {}
    # experts are stacked in this order, and experts.2 comes before experts.10
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # stored under its own name, which a rule matches by accident
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            unused[name] = target, any(re.search(pattern, target) for pattern in skipped)
            continue
        group = by_target.get(target)
        if group is None:
            rule = by_pattern[pattern] if pattern else None
            group = by_target[target] = Group({}, {}, _first=target, _rule=rule, _model=model)
        if group._rule is not None or not group.sources:  # the first of two tensors for one name wins
            group.sources[name] = pattern or name
    for group in by_target.values():
        # fill in `made` and `problem` by a conversion on the meta device, without reading a tensor
        empty = {name: torch.empty(shapes[name], device="meta") for name in group.sources}
        try:
            group.made = {name: tensor.shape for name, tensor in group.convert(empty).items()}
        except Exception as error:  # any error of torch about missing experts or experts of different sizes
            group.made, group.problem = {group._first: torch.Size()}, " ".join(str(error).split())
    return list(by_target.values()), unused


class Storage:
    """Conversion to the layout of `save_pretrained`. `model` is on the meta device, without an adapter."""

    def __init__(self, model: PreTrainedModel):
        # PrefixChange adds the prefix of a larger model's file; save_pretrained also leaves the prefix out
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
        self._converts = bool(rules)
        self._model: Any = copy.copy(model)
        self._model._weight_conversions = rules  # where revert_weight_conversion looks first
        backwards = [rule.reverse_transform() for rule in rules[::-1]]
        self._converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]

    def groups(self, names: list[str]) -> dict[str, tuple[str, ...]]:
        """Map each parameter's name to all names that are stored together with it, its own included."""
        together: dict[str, list[str]] = {}
        for name in names:
            target, pattern = rename_source_key(name, [], self._converters, reverse=True)
            together.setdefault(target if pattern else name, []).append(name)
        return {name: tuple(group) for group in together.values() for name in group}

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a group's parameters by name to stored tensors by name."""
        return revert_weight_conversion(self._model, tensors) if self._converts else tensors


def supports(model_class: type[PreTrainedModel], attention: str) -> bool:
    """Whether a family supports the attention implementation: sdpa, flex_attention or flash_attention_2."""
    name = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(attention, "_supports_flash_attn")
    assert hasattr(model_class, name), f"transformers {transformers_version} has no {name}"
    return getattr(model_class, name)
