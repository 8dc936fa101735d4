"""Models packaged as multimodal: the text part is trained as a model of its own, all else is kept as it is stored.

A `*ForConditionalGeneration` holds a language model between towers for images or sound and projectors. Rows of text
never reach those, so the language model alone has the same losses and gradients, and every strategy knows its family.
Names and layout in the files are the published class's, by transformers' own rules; an export copies the tensors of
towers and projectors from the start model's files, byte by byte, and no process ever loads them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from samecurve.errors import ConfigurationError
from samecurve.models.config_overrides import ROPE
from samecurve.specs.model_families import PACKAGED, TEXT_TWINS

# Files of the processor that prepares images and sound beside the tokenizer; transformers.utils names them.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Package:
    """The published model around a text model.

    Attributes:
        model: the published class, on the meta device.
        path, revision: of the start model.
        fields: the content of its config.json, with the rows that a chat template adds to the vocabulary.
        prefixes: beginnings of names in the text model, and of the same in the published one.
    """

    model: PreTrainedModel
    path: str
    revision: str | None
    fields: dict[str, Any]
    prefixes: tuple[tuple[str, str], ...]

    def name(self, name: str) -> str:
        """Translate the name of a module, parameter or buffer of the text model to the published model's."""
        own, published = next(pair for pair in self.prefixes if name.startswith(pair[0]))
        return published + name.removeprefix(own)

    def config_fields(self, dtype: str) -> dict[str, Any]:
        """Return the content of an export's config.json: the start model's, but for the dtype and the vocabulary."""
        fields = copy.deepcopy(self.fields)
        for level in (fields, fields.get("text_config", {})):
            if level.pop("torch_dtype", level.get("dtype")) or level is fields:
                level["dtype"] = dtype
        return fields


def is_packaged(config: PreTrainedConfig) -> bool:
    """Whether a stored config is one of a family whose text part can be trained alone."""
    return config.model_type in PACKAGED and type(config).__module__.startswith("transformers.models.")


def published_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Find the class of a packaged model."""
    mapped: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    return mapped[0] if isinstance(mapped, (list, tuple)) else mapped


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Build the config of the text part alone, of a family with a causal class where it has none itself."""
    inner = copy.deepcopy(config.get_text_config())
    if inner.model_type in TEXT_TWINS:
        family, more = TEXT_TWINS[inner.model_type]
        known = inspect.signature(type(AutoConfig.for_model(family)).__init__).parameters.keys() - {"architectures"}
        fields = {key: getattr(inner, key) for key in known if hasattr(inner, key)} | dict(more)
        rope = {key: value for key, value in (fields.get("rope_parameters") or {}).items() if "mrope" not in key}
        inner = AutoConfig.for_model(family, **fields | {"rope_parameters": rope})
    # each class asks its own config, and the published one is asked the outer
    inner.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    inner._name_or_path = config._name_or_path
    return inner


def wrap(
    text: PreTrainedModel,
    config: PreTrainedConfig,
    revision: str | None,
    overridden: Iterable[str],
    build: Callable[..., PreTrainedModel],
) -> None:
    """Attach the published model to the skeleton of its text part; see `package_of`.

    Args:
        text: the skeleton, on the meta device.
        config: the published model's, as it is stored.
        revision: of a hub name.
        overridden: fields of the text model's config that are not the published ones, see `model.overrides`.
        build: called with the published class and its config, builds it on the meta device.

    Raises:
        ConfigurationError: the published class does not hold this text model.
    """
    path, inner, size = config._name_or_path, config.get_text_config(), text.config.vocab_size
    fields, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    for level in (fields, fields.get("text_config", {})):
        for key in ("_commit_hash", "quantization_config"):  # an export is unquantized
            level.pop(key, None)
    stored, names = fields.get("text_config", fields), text.config.attribute_map
    for key in {names.get(key, key) for key in overridden}:
        value = getattr(text.config, key, None)
        older = {alias for alias, name in names.items() if name == key}
        if key in ROPE:
            # a text needs no positions in three dimensions, but images do
            own = {name: part for name, part in (inner.rope_parameters or {}).items() if "mrope" in name}
            key, value, older = "rope_parameters", own | text.config.rope_parameters, {*ROPE}
        for name in older:
            stored.pop(name, None)
        stored[key] = copy.deepcopy(value)
        setattr(inner, key, value)
    if inner.vocab_size != size:
        if getattr(inner, "vocab_size_per_layer_input", None) == inner.vocab_size:
            inner.vocab_size_per_layer_input = stored["vocab_size_per_layer_input"] = size
        inner.vocab_size = stored["vocab_size"] = size
        if "vocab_size" in fields:
            fields["vocab_size"] = size
    whole = build(published_class(config), config)
    vars(text)["package"] = Package(whole, path, revision, fields, _prefixes(text, whole))


def package_of(model: PreTrainedModel) -> Package | None:
    """Return the published model around a skeleton; None for a model that is published as text alone."""
    return vars(model).get("package")


def _prefixes(text: PreTrainedModel, whole: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    """Find the text model inside the published one by the names and shapes of its tensors."""
    wanted, base = _shapes(text), _shapes(text.base_model)
    inner = [(name, part) for name, part in whole.named_modules() if name and isinstance(part, PreTrainedModel)]
    tied = [model.get_input_embeddings().weight is _head(model).weight for model in (text, whole)]
    for name, part in inner if tied[0] == tied[1] else ():
        shapes = _shapes(part)
        if shapes == wanted:
            return (("", f"{name}."),)
        if shapes == base and _head(whole).weight.shape == _head(text).weight.shape:
            heads = [
                next(name for name, part in model.named_modules() if part is _head(model)) for model in (text, whole)
            ]
            return ((f"{text.base_model_prefix}.", f"{name}."), (heads[0], heads[1]))
    raise ConfigurationError(
        f"model.path: no part of a {type(whole).__name__} is transformers' {type(text).__name__}, by the names and "
        "shapes of its weights and by whether the output head is tied; use a checkpoint that is published as text alone"
    )


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
