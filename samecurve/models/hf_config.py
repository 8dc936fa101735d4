"""Construction and validation of the model's Hugging Face config.

transformers accepts unknown fields, and lets models that attend to following tokens train on predicting them. Neither
would stop a run, but both would make its result worthless.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import sys
from typing import Any

from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from samecurve.config.documents import suggest
from samecurve.config.rules_model import size_problems
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError, DataError
from samecurve.models import dequantize
from samecurve.models.attention.choice import choose_attention
from samecurve.models.config_overrides import with_overrides
from samecurve.models.packaged import is_packaged, published_class, text_config
from samecurve.specs.data_names import CHATML
from samecurve.specs.heads import CAUSAL, TITLES, Head
from samecurve.specs.model_families import families, looks_ahead
from samecurve.storage import trusted_code

_AUTO = {
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "masked_lm": AutoModelForMaskedLM,
    "embedding": AutoModel,
}
# Suggestions for messages about a family without such a head.
_FITTING = {
    "causal_lm": "causal language model of text alone; choose a decoder, for example llama",
    "sequence_classification": "model that transformers can classify text with; choose another, for example bert",
    "token_classification": "model that transformers can classify tokens with; choose another, for example bert",
    "masked_lm": "masked language model; choose an encoder, for example bert",
    "embedding": "model that gives each token of a text a state; choose another, for example bert",
}

# Keys of published configs: how the published weights were made and stored, and what another key of the recipe sets.
_RECORDS = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map dtype gradient_checkpointing
    quantization_config task_specific_params tokenizer_class torch_dtype transformers_version unsloth_fixed
    unsloth_version use_cache
    """.split()
)
# Fields that published configs have although their family's code does not read them.
_FIELDS_OF_OTHERS = frozenset(
    """
    experts_per_token initial_context_length max_window_layers n_ctx pretraining_tp use_mrope use_sliding_window
    """.split()
)


def find_class(head: Head, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Find the model class of the config's family with this head; None if the family has no such head."""
    if head.kind == CAUSAL.kind and is_packaged(config):
        return published_class(config)  # AutoModelForCausalLM has the text part alone for some families
    auto = _AUTO[head.kind]
    if type(config) in auto._model_mapping:
        mapped = auto._model_mapping[type(config)]
        return mapped[0] if isinstance(mapped, (list, tuple)) else mapped  # the first is the Auto class's default
    # a config with its own code has been accepted by model.trust_remote_code and names the model's class
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if reference is None or not is_remote(config):
        return None
    revision = getattr(config, "_commit_hash", None)
    remote_class = get_class_from_dynamic_module(reference, config._name_or_path, revision=revision)
    remote_class.register_for_auto_class(auto.__name__)  # so that an export includes the Python files
    return remote_class


def without_pooler(model_class: type[PreTrainedModel]) -> dict[str, bool]:
    """Constructor arguments that leave out a bare encoder's pooler; embeddings are pooled from the token states."""
    known = inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in known else {}


def model_config(
    recipe: Recipe,
    vocabulary_size: int,
    special_tokens: dict[str, int] | None = None,
    head: Head = CAUSAL,
    stored: PreTrainedConfig | None = None,
) -> PreTrainedConfig:
    """Build the Hugging Face config of `model.path` or `model.config`.

    Args:
        recipe: the recipe.
        vocabulary_size: the tokenizer's; default of `vocab_size` in a from-scratch config.
        special_tokens: the tokenizer's ids (bos_token_id, eos_token_id), defaults in a from-scratch config.
        head: the output head.
        stored: what `stored_config` returns; None reads it.

    Raises:
        DataError: the tokenizer has ids for which the embedding has no row.
        ConfigurationError: the model does not exist, has no such head or too few positions, or transformers rejects
            or does not know a field.
    """
    settings = recipe.model
    if settings.path is not None:
        if stored is None:
            stored = stored_config(settings.path, settings.trust_remote_code, settings.revision)
        config = copy.deepcopy(stored)
        packaged = head.kind == CAUSAL.kind and is_packaged(config)
        config = text_config(config) if packaged else config
        if settings.overrides:
            published, _ = PreTrainedConfig.get_config_dict(settings.path, revision=settings.revision)
            if packaged:
                published = published.get("text_config", published)
                published = {**published, "tie_word_embeddings": config.tie_word_embeddings}
            published = published if published.get("model_type") == config.model_type else config.to_dict()
            config = with_overrides(config, published, settings.overrides, head.fields)
    else:
        assert settings.config is not None  # a recipe gives either path or config
        config = _from_scratch(settings.config, {"vocab_size": vocabulary_size, **(special_tokens or {})}, head)
    two_parts = head.kind == "embedding" and config.is_encoder_decoder  # the decoder would also need an input
    model_class = find_class(head, config)
    if model_class is None or "vocab_size" not in _fields(config) or two_parts:
        raise ConfigurationError(f"model: {config.model_type} is not a {_FITTING[head.kind]}")
    if head.kind == "masked_lm" and getattr(config, "is_decoder", False):
        raise ConfigurationError(
            "model: is_decoder is true, which hides the tokens after a masked one; set it to false"
        )
    for key, value in head.fields.items():
        setattr(config, key, value)
    if config.vocab_size < vocabulary_size:
        _make_room(recipe, config, vocabulary_size)
    length, positions = recipe.batch.sequence_length, getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < length:  # -1 where there is no limit
        text = f"found {length}, but the model's max_position_embeddings is {positions}; use at most {positions}"
        raise ConfigurationError(f"batch.sequence_length: {text}")
    config._attn_implementation = choose_attention(recipe, config, model_class, head.kind)
    return config


def _make_room(recipe: Recipe, config: PreTrainedConfig, vocabulary_size: int) -> None:
    """Extend a pretrained model's vocabulary by the tokens of a chat template, or raise DataError if not possible."""
    text = f"the tokenizer has {vocabulary_size} ids, but the model's embedding holds {config.vocab_size} (vocab_size)"
    # an adapter trains no new rows; the tokenizer's loader refuses tokens that the template adds
    if recipe.model.path is None or recipe.tokenizer.chat_template != CHATML or recipe.adapter.name is not None:
        fix = "leave model.config.vocab_size out, or use the tokenizer that it was meant for"
        if recipe.model.path is not None:
            fix = f"the one in {recipe.model.path} does not belong to it; name the model's own as tokenizer.path"
            if recipe.tokenizer.path is not None:
                fix = f"{recipe.tokenizer.path} does not belong to it; leave tokenizer.path out"
        raise DataError(f"{text}: {fix}")
    # Gemma 4 has a second table of the same ids; in Gemma 3n ids beyond that table's end share a row
    if getattr(config, "vocab_size_per_layer_input", None) == config.vocab_size:
        config.vocab_size_per_layer_input = vocabulary_size
    config.vocab_size = vocabulary_size


def has_attention(config: PreTrainedConfig) -> bool:
    """Whether the model family has attention; Mamba and similar families have none."""
    return "num_attention_heads" in _fields(config)


def is_remote(config: PreTrainedConfig) -> bool:
    """Whether the config's class came with the model's files (see model.trust_remote_code)."""
    return type(config).__module__.startswith("transformers_modules.")


def is_classifier(model: PreTrainedModel) -> bool:
    return kind_of(model) == "sequence_classification"


def has_new_head(model: PreTrainedModel) -> bool:
    """Whether the task trains a head, without which language models are pretrained."""
    return kind_of(model) in ("sequence_classification", "token_classification")


def output_shape(model: PreTrainedModel, input_ids: Tensor) -> tuple[int, ...]:
    """Return the shape of what a model makes of input_ids, (rows, sequence_length); see Task.outputs."""
    kind, config = kind_of(model), model.config
    if kind == "sequence_classification":
        return len(input_ids), len(config.id2label or ())
    if kind == "token_classification":
        return *input_ids.shape, len(config.id2label or ())
    return *input_ids.shape, config.hidden_size if kind == "embedding" else config.vocab_size


def kind_of(model: PreTrainedModel) -> str:
    """Find Head.kind of a model by its class."""
    return next((kind for kind in TITLES if find_class(Head(kind), model.config) is type(model)), CAUSAL.kind)


def kind_of_stored(config: PreTrainedConfig) -> str:
    """Find Head.kind of a stored model by the class recorded in its config."""
    made_as = config.architectures or ()
    classes = {kind: find_class(Head(kind), config) for kind in TITLES}
    return next((kind for kind, made in classes.items() if made and made.__name__ in made_as), CAUSAL.kind)


def check_causal(model: PreTrainedModel) -> None:
    """Raise ConfigurationError for a model whose positions attend to following tokens, as in BERT.

    Most such families have a causal variant, enabled by `is_decoder`. A causal variant in a separate class (BART's) has
    set the key itself by now. GPT-NeoX also has the key, but only a causal mask.
    """
    config = model.config
    may_look_ahead = hasattr(sys.modules[type(model).__module__], "create_bidirectional_mask")
    if config.model_type in families("not_causal") or (may_look_ahead and getattr(config, "is_decoder", None) is False):
        raise ConfigurationError(
            f"model: every position of a {config.model_type} sees the following tokens, which it would be trained to "
            "predict; choose a decoder, for example llama, or set is_decoder to true where the config has that key"
        )
    if ahead := looks_ahead(config.to_dict()):
        raise ConfigurationError(
            f"model: {ahead}, so every position sees the following tokens, which it would be trained to predict; "
            "choose another model, or train this one with task embed or classify"
        )


def check_state(model: PreTrainedModel) -> None:
    """Raise ConfigurationError for BatchNorm, whose running statistics learn other than by gradients.

    It also makes a row's outputs depend on the rows beside it. Other buffers that change are noticed when they do:
    engines/accelerated.py.
    """
    family = model.config.model_type
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ConfigurationError(
                f"model: {name} of this {family} is a {type(layer).__name__}, which normalizes a row by the other rows "
                "of its micro-batch, so that the curve would depend on the micro-batch; its running statistics would "
                "differ between ranks and be updated twice where activations are recomputed. Use a model with "
                "LayerNorm or RMSNorm"
            )


def reason(error: Exception) -> str:
    """Format an error from transformers as one line of limited length."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"


def check_sizes(path: str, revision: str | None = None) -> None:
    """Raise ConfigurationError for impossible sizes in config.json. Before transformers reads it: it lists the layers.

    Raises what transformers does for a file that is missing or no JSON, too.
    """
    fields, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    if problems := [f"{path}: config.json: {key}: {text}" for key, text in size_problems(fields)]:
        raise ConfigurationError("\n".join(problems))


def stored_config(path: str, trust_remote_code: bool, revision: str | None) -> PreTrainedConfig:
    """Read the config of `model.path`. Raises ConfigurationError if that is not possible or not allowed."""
    try:
        check_sizes(path, revision)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
        config._commit_hash = revision  # where model_class looks for the model's code
        if problem := dequantize.take_settings(config, path):
            raise ConfigurationError(problem)
        return config
    except ConfigurationError:
        raise
    except Exception as error:  # transformers, huggingface_hub and the model families raise different types
        if trusted_code.is_refusal(error):
            raise ConfigurationError(f"model.path: {trusted_code.refusal(path)}") from error
        at = f" at revision {revision}" if revision else ""
        fix = "a folder needs config.json, a hub name needs the network or an earlier download"
        raise ConfigurationError(
            f"model.path: no model's config could be read from {path}{at} ({reason(error)}); {fix}"
        ) from error


def _from_scratch(fields: dict[str, Any], defaults: dict[str, int], head: Head) -> PreTrainedConfig:
    model_type = fields["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = f"transformers {transformers_version} has no model_type {model_type}{hint}"
        raise ConfigurationError(f"model.config.model_type: {text}")
    idle = {"model_type", *without_effect(fields)}
    given = {key: value for key, value in fields.items() if key not in idle}
    try:
        # a copy, because transformers completes nested fields in place
        config = AutoConfig.for_model(model_type, **(defaults | copy.deepcopy(given)))
    except Exception as error:  # huggingface_hub's for a wrong type, others from each family's own checks
        text = f"model.config: transformers refuses these fields for a {model_type} ({reason(error)})"
        raise ConfigurationError(text) from error
    # Older spellings (rope_theta) are valid if the family translates them; a translated key leaves no attribute. So are
    # keys that only the model's code knows, such as head_dim of a qwen3_moe: `getattr(config, "head_dim", ...)`.
    known = _fields(config)
    model_class = find_class(head, config)
    code = "" if model_class is None else inspect.getsource(sys.modules[model_class.__module__])
    legal = [("model", "config", key) for key in known]
    problems = []
    for key in given.keys() - known:
        path = ("model", "config", key)
        if key == "attn_implementation":
            problems.append("model.config.attn_implementation: the recipe's model.attention sets it; remove it")
        elif key in vars(config) and not re.search(rf"""config(\.|, ["']){re.escape(key)}\b""", code):
            text = f"the config of {config.model_type} has no such key{suggest(path, legal) or '; remove it'}"
            problems.append(f"model.config.{key}: {text}")
    if problems:
        raise ConfigurationError("\n".join(sorted(problems)))
    return config


def without_effect(fields: dict[str, Any]) -> list[str]:
    """List the keys of a published config.json that change nothing about a model from scratch.

    They say how the published weights were made, stored or sampled from, or are a field in other families alone.
    """
    own = inspect.signature(CONFIG_MAPPING[fields["model_type"]].__init__).parameters
    idle = _FIELDS_OF_OTHERS | vars(GenerationConfig()).keys()
    return [key for key in fields if key in _RECORDS or (key in idle and key not in own)]


def _fields(config: PreTrainedConfig) -> set[str]:
    return {*inspect.signature(type(config).__init__).parameters, *type(config).attribute_map} - {"self", "kwargs"}
