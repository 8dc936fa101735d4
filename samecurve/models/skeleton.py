"""Construction of a recipe's model without weights: config, architecture, adapter and checks.

`weights.load_weights` supplies the initial weights of such a model, one parameter at a time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.utils import GENERATION_CONFIG_NAME

from samecurve.config.schema import Adapter, Model, Optimizer, Recipe
from samecurve.errors import ConfigurationError
from samecurve.models import dequantize, packaged
from samecurve.models import lora as adapters
from samecurve.models.config_overrides import check_shapes
from samecurve.models.hf_config import (
    check_causal,
    check_state,
    find_class,
    model_config,
    reason,
    stored_config,
    without_pooler,
)
from samecurve.specs.heads import CAUSAL, Head


def build_skeleton(
    recipe: Recipe, vocabulary_size: int, special_tokens: dict[str, int] | None = None, head: Head = CAUSAL
) -> PreTrainedModel:
    """Build the model on the meta device, with every tensor in fp32 and full shape.

    Args:
        recipe: gives model, adapter and sequence length.
        vocabulary_size: the tokenizer's, see `model_config`.
        special_tokens: the tokenizer's ids, see `model_config`.
        head: the output head.

    Raises:
        DataError: as `model_config`.
        ConfigurationError: the model cannot be built or is not causal, or as `model_config`.
    """
    settings, stored = recipe.model, None
    if settings.path is not None:
        stored = stored_config(settings.path, settings.trust_remote_code, settings.revision)
    config = model_config(recipe, vocabulary_size, special_tokens, head, stored)
    model_class = find_class(head, config)
    assert model_class is not None  # model_config has checked it
    try:
        model = construct(model_class, config, torch.device("meta"))
    except Exception as error:  # a missing package, or an attention or activation that the family does not support
        raise ConfigurationError(
            f"model: transformers cannot build this {config.model_type} with model.attention {recipe.model.attention} "
            f"({reason(error)}); correct model.attention or the model's config"
        ) from error
    if recipe.model.overrides:
        check_shapes(recipe.model.overrides, lambda given: _with(given, recipe, config, head, stored), model)
    vars(model)["unproven_uses"] = [] if recipe.model.unproven else None
    _check_positions(model, head, recipe.batch.sequence_length)
    if head.kind == "causal_lm":
        check_causal(model)
    check_state(model)
    if settings.path is not None and model.can_generate():
        _take_generation_config(model, settings)
    if head.kind == CAUSAL.kind and stored is not None and packaged.is_packaged(stored):
        build = partial(construct, where=torch.device("meta"))
        packaged.wrap(model, stored, settings.revision, settings.overrides, build)
    if recipe.adapter.name:
        assert recipe.model.path is not None  # the recipe's rules demand pretrained weights under an adapter
        if problem := dequantize.adapter_problem(recipe.model.path, recipe.model.revision):
            raise ConfigurationError(problem)
        adapters.inject(model, recipe.adapter, recipe.model.revision)
        adapters.check_targets(model, recipe.adapter)
    check_groups(model, recipe.optimizer)
    freeze(model, recipe.optimizer)
    return model


def check_groups(model: PreTrainedModel, settings: Optimizer) -> None:
    """Raise ConfigurationError, with every problem, if a group matches no parameter, or all are frozen."""
    every = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    aliases = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in every]
    taken, problems = {name: settings.group_of(name) for name in trained}, []
    for place, group in enumerate(settings.groups):
        if any(group is taker for taker in taken.values()):
            continue
        key = f"optimizer.groups.{place}.pattern: {group.pattern!r}"
        if matched := [name for name in trained if group.matches(name)]:
            earlier = taken[matched[0]]
            assert earlier is not None  # the group before this one that matches
            text = f"the earlier {earlier.pattern!r} matches {matched[0]} and all else that it matches, and counts"
            problems.append(f"{key}: {text}; put the narrower pattern first")
        elif tied := [name for name in aliases if group.matches(name)]:
            first = {id(parameter): name for name, parameter in model.named_parameters()}
            own = first[id(model.get_parameter(tied[0]))]
            problems.append(f"{key} matches {tied[0]}, which is tied to {own}, one parameter for both; name {own}")
        elif still := [name for name in every if group.matches(name)]:
            why = "the adapter freezes" if adapters.is_adapted(model) else "this family never trains"
            problems.append(f"{key} matches only parameters that {why}, such as {still[0]}; remove the group")
        else:
            # by the part of a name, with `*` for numbers, that is most like the pattern
            wanted = group.pattern.strip("*.")
            likeness = dict.fromkeys((re.sub(r"\.\d+(?=\.)", ".*", name) for name in [*trained, *aliases]), 0.0)
            for name in likeness:
                parts = name.split(".")
                tails = (".".join(parts[start:]) for start in range(len(parts)))
                ratios = (difflib.SequenceMatcher(None, wanted, text).ratio() for text in (*parts, *tails))
                likeness[name] = max(ratios)
            near = ", ".join(sorted(likeness, key=likeness.__getitem__, reverse=True)[:3])
            text = f"matches no parameter of this {model.config.model_type}; the nearest names are {near}"
            problems.append(f"{key} {text} (`*` stands for any text)")
    if not problems and all(group is not None and group.frozen for group in taken.values()):
        problems.append("optimizer.groups: they freeze every parameter, so that nothing is left to train; remove one")
    if problems:
        raise ConfigurationError("\n".join(problems))


def freeze(model: PreTrainedModel, settings: Optimizer) -> PreTrainedModel:
    """Freeze the parameters of the recipe's frozen groups, in place, before a strategy wraps or shards them."""
    parameters = dict(model.named_parameters()) if settings.freezes else {}
    names = {name for name in parameters if (group := settings.group_of(name)) and group.frozen}
    for name in names:
        parameters[name].requires_grad_(False)
    vars(model)["frozen"] = names  # pretrained.frozen
    return model


def _with(
    given: Mapping[str, Any], recipe: Recipe, config: PreTrainedConfig, head: Head, stored: Any
) -> PreTrainedModel:
    """Build a pretrained model with some of the recipe's overrides, for rows of any length."""
    model = recipe.model.model_copy(update={"overrides": given})
    short = recipe.batch.model_copy(update={"sequence_length": 1})
    plain = model_config(recipe.model_copy(update={"model": model, "batch": short}), 0, None, head, stored)
    if "vocab_size" not in given and "vocab_size" not in recipe.model.overrides:
        plain.vocab_size = config.vocab_size  # a chat template may have extended it
    model_class = find_class(head, plain)
    assert model_class is not None
    return construct(model_class, plain, torch.device("meta"))


def _take_generation_config(model: PreTrainedModel, settings: Model) -> None:
    """Give the model the generation config of `model.path`, for its export; without one it has that of its config."""
    path = str(settings.path)
    try:
        model.generation_config = GenerationConfig.from_pretrained(path, revision=settings.revision or "main")
    except (OSError, ValueError) as error:
        if (Path(path) / GENERATION_CONFIG_NAME).exists():
            raise ConfigurationError(f"model.path: {reason(error)}; correct the file or remove it") from error


def _check_positions(model: PreTrainedModel, head: Head, sequence_length: int) -> None:
    """Check the length of rows for models that number positions from `padding_idx + 1` on, as RoBERTa does.

    Their position embeddings leave out the rows up to `padding_idx`, so fewer positions are usable than
    max_position_embeddings.

    Raises:
        ConfigurationError: the rows are too long, or the model is causal: rows of text are numbered from 0 on.
    """
    tables = [table for name, table in model.named_modules() if name.endswith(".position_embeddings")]
    padding = [getattr(table, "padding_idx", None) for table in tables]  # I-BERT's is no nn.Embedding
    first = max((1 + index for index in padding if index is not None), default=0)
    if not first:
        return
    family, positions = model.config.model_type, model.config.max_position_embeddings
    if head.kind == "causal_lm":
        text = f"a {family} numbers positions from behind its padding token on, and rows of text from 0 on"
        raise ConfigurationError(f"model: {text}; choose a decoder, for example llama")
    if positions < sequence_length + first:
        text = f"found {sequence_length}, but the model's max_position_embeddings is {positions}, of which {family}"
        fix = f"use at most {positions - first}"
        raise ConfigurationError(f"batch.sequence_length: {text} uses those from {first} on; {fix}")


def construct(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    where: AbstractContextManager,
    adapter: Adapter | None = None,
) -> PreTrainedModel:
    """Build an fp32 model with uninitialized weights.

    Args:
        model_class: the transformers class.
        config: the model's config.
        where: context of the construction, for example a torch.device or deepspeed.zero.Init.
        adapter: adapter to insert; None or an adapter without a name inserts none.

    Raises:
        ConfigurationError: as lora.inject.
    """
    with no_init_weights(), where:
        # Hide ZeRO-3 from transformers: `from_config`, with which its classifiers build their decoder, would shard even
        # a skeleton. Only `where` decides about that. peft needs to see ZeRO-3, because DoRA reads weights.
        known = deepspeed_integration._hf_deepspeed_config_weak_ref
        deepspeed_integration._hf_deepspeed_config_weak_ref = None
        try:
            model = model_class(config, **without_pooler(model_class))
        finally:
            deepspeed_integration._hf_deepspeed_config_weak_ref = known
        if adapter is not None and adapter.name:
            adapters.inject(model, adapter)
    model.tie_weights()  # no_init_weights skips tying
    model.config.use_cache = False  # with a cache, transformers (5.23) ignores where packed documents begin
    return model.train()


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Return the skeleton without its adapter."""
    return construct(type(model), model.config, torch.device("meta")) if adapters.is_adapted(model) else model
