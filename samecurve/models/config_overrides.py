"""model.overrides: fields of a published config that a run replaces, as if config.json had them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from samecurve.config.documents import describe, suggest
from samecurve.errors import ConfigurationError

ROPE = ("rope_parameters", "rope_scaling", "rope_theta")  # the last two are the spelling before transformers 5
_OF_ANY_TYPE = ("rope_theta", "partial_rotary_factor")
_SCALED_FROM = ("yarn", "longrope", "llama3")  # rope types that read original_max_position_embeddings
# Where another key of the recipe decides.
_ELSEWHERE = {
    "attn_implementation": "the recipe's model.attention sets it",
    "dtype": "the recipe's precision sets it",
    "torch_dtype": "the recipe's precision sets it",
    "model_type": "the weights belong to the published family",
    "quantization_config": "it describes how the published weights are stored",
    "architectures": "the task chooses the class",
    "use_cache": "training uses no cache",
}


def with_overrides(
    config: PreTrainedConfig, published: Mapping[str, Any], given: Mapping[str, Any], set_by_task: Mapping[str, Any]
) -> PreTrainedConfig:
    """Build the config that transformers would read from a config.json with other fields.

    Rotary parameters are merged: rope_theta is the published one unless it is given, and so is the number of positions
    that YaRN, longrope and Llama 3's scaling extend.

    Args:
        config: as transformers reads it from the file.
        published: the file's content.
        given: `model.overrides`.
        set_by_task: fields that the task sets afterwards.

    Raises:
        ConfigurationError: unknown fields and parameters, fields that another key sets, or what transformers refuses.
    """
    legal = {*inspect.signature(type(config).__init__).parameters, *config.attribute_map, *config.to_dict(), *published}
    legal -= {"self", "kwargs", *_ELSEWHERE}
    if hasattr(config, "rope_parameters"):
        legal |= {*ROPE}
    problems = []
    for key in given:
        if key in _ELSEWHERE or key in set_by_task:
            problems.append(f"{key}: {_ELSEWHERE.get(key, 'the task sets it')}; remove it")
        elif key not in legal:
            hint = suggest((key,), [(name,) for name in legal if not name.startswith("_")]) or "; remove it"
            problems.append(f"{key}: the config of {config.model_type} has no such key{hint}")
    renamed = {config.attribute_map.get(key, key): value for key, value in given.items() if key in legal}
    fields = {key: value for key, value in published.items() if config.attribute_map.get(key, key) not in renamed}
    fields.pop("quantization_config", None)  # see dequantize.take_settings
    fields |= renamed
    if any(key in given for key in ROPE) and "rope_theta" in legal:
        rope = next((given[key] for key in ROPE[:2] if key in given), {})
        theta = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
        for key in ROPE:
            fields.pop(key, None)
        fields["rope_parameters"] = _rope(config, rope, theta, problems)
    if problems:
        raise ConfigurationError("\n".join(f"model.overrides.{problem}" for problem in problems))
    try:
        changed = type(config).from_dict(fields)
        changed.validate_rope()
    except Exception as error:  # each family has its own checks
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"model.overrides: transformers refuses them ({reason})") from error
    changed._name_or_path, changed._commit_hash = config._name_or_path, getattr(config, "_commit_hash", None)
    return changed


def _rope(config: PreTrainedConfig, given: Any, theta: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Merge rotary parameters into the published ones, and append to `problems`."""
    published = config.rope_parameters or {}
    kinds = [kind for kind, parameters in published.items() if isinstance(parameters, dict)]
    if not isinstance(given, dict) or (kinds and (theta or not given.keys() <= {*kinds})):
        expected = f"parameters for {' or '.join(kinds)}" if kinds else "parameters such as rope_type and factor"
        problems.append(f"rope_parameters: found {describe(given or theta)}, expected {expected}")
        return {}
    if kinds:
        return {**published, **{kind: _scaled(config, published[kind], given[kind], problems) for kind in given}}
    return _scaled(config, published, given | theta, problems)


def _scaled(
    config: PreTrainedConfig, published: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    own = {"rope_type" if key == "type" else key: value for key, value in given.items()}
    known = {*RopeParameters.__annotations__, *published}
    for key in own.keys() - known:
        hint = suggest(("rope_parameters", key), [("rope_parameters", name) for name in sorted(known)])
        problems.append(f"rope_parameters.{key}: transformers knows no such parameter{hint}")
    before = published.get("rope_type", "default")
    kind = own.setdefault("rope_type", before)
    if kind not in {"default", before, *ROPE_INIT_FUNCTIONS}:
        names = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        problems.append(f"rope_parameters.rope_type: found {describe(kind)}, expected one of {names}")
    kept = {key: value for key, value in published.items() if kind == before or key in _OF_ANY_TYPE}
    if kind in _SCALED_FROM:
        start = published.get("original_max_position_embeddings", config.max_position_embeddings)
        kept.setdefault("original_max_position_embeddings", start)
    return {**kept, **own}


def check_shapes(
    given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], PreTrainedModel], changed: PreTrainedModel
) -> None:
    """Raise ConfigurationError if overrides change which weights there are, or a shape.

    Args:
        given: `model.overrides`.
        build: builds the model with some of them on the meta device.
        changed: the model with all of them.
    """
    published, now = _shapes(build({})), _shapes(changed)
    if published == now:
        return
    alone = {key: _shapes(build({key: value})) for key, value in given.items()}
    causes = {key: shapes for key, shapes in alone.items() if shapes != published} or dict.fromkeys(given, now)
    problems = []
    for key, shapes in causes.items():
        name = next(name for name in (*published, *shapes) if published.get(name) != shapes.get(name))
        before, after = (by_name.get(name, "no weight") for by_name in (published, shapes))
        problems.append(
            f"model.overrides.{key}: found {describe(given[key])}, which changes {name} from {before} to {after}; the "
            "published weights do not fit, so remove it"
        )
    raise ConfigurationError("\n".join(problems))


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}
