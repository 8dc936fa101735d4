"""Initial weights of a model, one parameter at a time.

Every engine first builds the model with uninitialized weights, sharded where the strategy shards it, and then loads the
weights. No process ever holds more than one block of the model besides its own shard or copy, and a from-scratch model
has the same weights under any sharding.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.models import dropout
from samecurve.models import lora as adapters
from samecurve.models.flops import num_experts
from samecurve.models.hf_config import has_attention, has_new_head, reason, without_effect
from samecurve.models.packaged import package_of
from samecurve.models.pretrained import Pretrained, constants, embeddings, frozen
from samecurve.models.skeleton import without_adapter
from samecurve.models.weight_files import Stored
from samecurve.specs.data_names import CHATML
from samecurve.specs.model_families import unproven_uses

Write = Callable[[str, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model, for the header and run.json.

    Attributes:
        model_type: of its config.
        attention: implementation, "none" for a model without any.
        dropout: the config's rates above 0 by config key.
        package: of a model packaged as multimodal: what it is, and the tensors beside its text part, counted.
        new_head: parameters that `model.path` lacks.
        kept_tensors, unread_tensors: the weights there that the model does not have, counted: those that the export
            contains unchanged, and the others.
        unread_keys: keys of model.config without effect.
        dequantized: how `model.path` stores weights that training reads as fp32, "" if it stores them unquantized.
        constants: the buffers and weights that the family itself does not train, counted.
        unproven: what `model.unproven` let pass.
    """

    model_type: str
    attention: str | None
    dropout: Mapping[str, float] = field(default_factory=dict)
    package: str = ""
    new_head: Sequence[str] = ()
    kept_tensors: str = ""
    unread_tensors: str = ""
    unread_keys: Sequence[str] = ()
    dequantized: str = ""
    constants: str = ""
    unproven: Sequence[str] = ()


def describe(model: PreTrainedModel, recipe: Recipe) -> ModelDescription:
    """Describe the model. Raises as `load_weights`."""
    head, kept, unread, part, dequantized, package = [], "", "", "", "", package_of(model)
    if recipe.model.path is not None:
        pretrained = pretrained_of(model, recipe)
        head = sorted(new_head(model, recipe, pretrained.missing()) - _continued(model, recipe))
        # an adapter's export holds no part of a package, which all the same stays as it is
        stays = package or not adapters.is_adapted(model)
        names = pretrained.kept(recipe.model.unknown_tensors) if stays else {}
        kept = pretrained.grouped([*names])
        unread = pretrained.grouped([name for group in pretrained.unused() for name in group if name not in names])
        dequantized = str(pretrained.contents)
        if package:
            kept, part = (
                "",
                f"text part of a {package.model.config.model_type}; {kept or 'no other tensors'} kept as stored",
            )
    # what the family itself does not train, by names without layer numbers
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in sorted(constants(model)))
    untrained = ", ".join(f"{name} ({number} tensor{'s' * (number > 1)})" for name, number in counts.items())
    if num_experts(model.config.get_text_config()) > 1 and any("bias" in name for name in counts):
        untrained += "; a router's bias is frozen: the load of the experts does not move it"
    return ModelDescription(
        model_type=model.config.model_type,
        attention=model.config._attn_implementation if has_attention(model.config) else "none",
        dropout=dropout.rates(model.config),
        package=part,
        new_head=head,
        kept_tensors=kept,
        unread_tensors=unread,
        unread_keys=without_effect(recipe.model.config) if recipe.model.config else [],
        dequantized=dequantized,
        constants=untrained,
        unproven=unproven_uses(model) or (),
    )


def load_weights(model: PreTrainedModel, recipe: Recipe, write: Write, names: set[str] | None = None) -> None:
    """Call `write(name, tensor)` once for every parameter and buffer of the skeleton `model`, or for those in `names`.

    Tensors are full, on the CPU and in fp32 (buffers as stored or computed). Tied parameters come once, under their
    name in `named_parameters()`. All ranks that call this function see the same values in the same order.

    Args:
        model: the architecture, on the meta device.
        recipe: gives `model.path`, and the seed of weights that are not stored there.
        names: parameters and buffers to load, None for all.

    Raises:
        ConfigurationError: the weights cannot be read, or the model cannot be initialized layer by layer.
    """
    stored = {name for name, _ in model.named_parameters()} | (constants(model) if recipe.model.path else set())
    wanted = stored if names is None else stored & names
    written = set()
    for name, tensor in _source(model, recipe, wanted):
        write(name, tensor)
        written.add(name)
    if not written >= wanted - {name for name, _ in model.named_buffers()}:
        raise ConfigurationError(
            f"model: {model.config.model_type} has weights outside its layers, which cannot be initialized: "
            f"{', '.join(sorted(wanted - written))}; use another model_type"
        )
    for name, tensor in _buffers(model, written):
        if names is None or name in names:
            write(name, tensor)


def frozen_tensors(model: PreTrainedModel, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of pretrained.frozen, read or drawn again one by one, for an export.

    They are the initial values, bit for bit. An adapter's export contains none. Raises as `load_weights`.
    """
    names = frozen(model) if not adapters.is_adapted(model) else set()
    yield from _source(model, recipe, names) if names else ()


def constant_tensors(model: PreTrainedModel, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an export's other tensors beside trained and frozen ones: pretrained.constants."""
    names = set() if adapters.is_adapted(model) else constants(model)
    tensors: dict[str, Tensor] = {}
    if names:
        load_weights(model, recipe, tensors.__setitem__, names)
    yield from tensors.items()


def kept_tensors(model: PreTrainedModel, recipe: Recipe, again: bool = False) -> dict[str, Stored]:
    """Find the tensors of `model.path` that the model does not have and that its export contains unchanged, by name.

    An adapter's export contains none. `again`: see `pretrained_of`.
    """
    if recipe.model.path is None or adapters.is_adapted(model):
        return {}
    return pretrained_of(model, recipe, again).kept(recipe.model.unknown_tensors)


def pretrained_of(model: PreTrainedModel, recipe: Recipe, again: bool = False) -> Pretrained:
    """Return the reader of `model.path`, which a skeleton keeps: the headers of all files are read once.

    Args:
        again: read them again, because the files may have changed.

    Raises:
        ConfigurationError: as weight_files.
    """
    path, revision = recipe.model.path, recipe.model.revision
    assert path is not None
    known = vars(model).get("pretrained")
    if again or known is None or known.origin != (path, revision):
        known = vars(model)["pretrained"] = Pretrained(model, without_adapter(model), path, revision)
    return known


def _source(model: PreTrainedModel, recipe: Recipe, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    if not recipe.model.path:
        yield from _seeded(model, recipe.seed, wanted)
        return
    continued = _continued(model, recipe) & wanted
    if continued:
        yield from adapters.stored_tensors(model, Path(str(recipe.adapter.path)), continued)
        wanted = wanted - continued
    added = {
        name: p.shape for name, p in model.named_parameters() if name in wanted and adapters.is_adapter_weight(name)
    }
    pretrained = pretrained_of(model, recipe)
    new = new_head(model, recipe, pretrained.missing()) - continued
    growing = embeddings(model) if recipe.tokenizer.chat_template == CHATML else set()
    stored = wanted - added.keys() - new - pretrained.new_constants()
    lost, hint = pretrained.missing() - new - continued, ""
    if lost and not has_new_head(model) and all(_is_heads(model, name) for name in lost):
        hint = (
            f", the head of a {type(model).__name__}; name a model that has it, or set model.new_head to true to make "
            "one"
        )
    pretrained.check(stored, growing, hint, recipe.model.unknown_tensors)
    yield from _seeded(model, recipe.seed, wanted & new)
    for name, tensor in pretrained.tensors(stored, growing):
        yield name, tensor
        derived = adapters.initial_magnitude(model, name, tensor) if added else None
        if derived is not None:
            yield derived
    yield from adapters.initial_matrices(added, recipe.seed)


def _continued(model: PreTrainedModel, recipe: Recipe) -> set[str]:
    """Find the parameters whose weights come from `adapter.path`: all that are trained."""
    return {*adapters.trained_shapes(model)} if recipe.adapter.path else set()


def _seeded(model: PreTrainedModel, seed: int, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Initialize a CPU copy of one block after another by the model family's own rule, with one random seed per module.

    Children come before their parents, as in transformers: GPT-2's attention overwrites its projection's values.
    """
    for prefix, unit in _units(model):
        if not any(f"{prefix}.{name}" in wanted for name, _ in unit.named_parameters()):
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            real = _unset(unit)
            for name, module in reversed(list(real.named_modules())):
                key = f"{seed}:{prefix}.{name}".encode()
                # torch.manual_seed would also seed the GPU's generator, which fork_rng does not restore here
                torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)
                try:
                    model._init_weights(module)
                except Exception as error:  # for example a rule that needs the rest of the model
                    text = f"model: {model.config.model_type} cannot be initialized layer by layer: "
                    raise ConfigurationError(f"{text}{prefix}.{name}: {reason(error)}") from error
        _check_set(model, prefix, real.named_parameters())
        named = ((f"{prefix}.{name}", parameter.detach()) for name, parameter in real.named_parameters())
        yield from ((name, tensor) for name, tensor in named if name in wanted)


def _unset(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU with all values nan, to detect those that are never set."""
    real = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.fill_(_never_set(tensor))
    return real


def _never_set(tensor: Tensor) -> float:
    """Return the value that marks elements which no rule has set."""
    if tensor.is_floating_point():
        return math.nan
    return 0 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


def _left(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """List the tensors with values that no rule has set."""
    return [
        name
        for name, tensor in tensors
        if bool((tensor.isnan() if tensor.is_floating_point() else tensor == _never_set(tensor)).any())
        and tensor.dtype is not torch.bool
    ]


def _check_set(model: PreTrainedModel, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigurationError for values that `_init_weights` left unset: a parent module sets them, or nothing."""
    if left := _left(tensors):
        raise ConfigurationError(
            f"model: {model.config.model_type} does not initialize {prefix}.{left[0]} in that module's own rule, so "
            "its layers cannot be initialized one by one; use another model_type"
        )


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks to initialize as a whole: each layer of a ModuleList, and modules without a ModuleList."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", layer) for index, layer in child.named_children())
        elif any(isinstance(m, nn.ModuleList) for m in child.modules()):
            yield from _units(child, path)
        else:
            yield path, child


def _buffers(model: PreTrainedModel, written: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers such as rotary frequencies, which `_init_weights` recomputes after construction on meta.

    Those in `written` are left out. The rule is a module's own or, as in Falcon-H1, that of one around it.
    """
    later: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        names = {name: f"{prefix}.{name}" if prefix else name for name in module._buffers}
        if names and not any(b is None for b in module._buffers.values()) and not written.issuperset(names.values()):
            with torch.random.fork_rng(devices=[]), torch.no_grad():  # the rule may also draw the module's weights
                real = _unset(module)
                model._init_weights(real)
            if _left(real.named_buffers(recurse=False)):
                later[prefix] = module
                continue
            yield from ((names[name], b) for name, b in real.named_buffers(recurse=False) if names[name] not in written)
    if not later:
        return
    whole = copy.deepcopy(model)  # its weights stay on the meta device
    around = {prefix[:end] for prefix in later for end, sign in enumerate(f"{prefix}.") if sign == "."} - {*later}
    for prefix in later:
        for name, buffer in [*whole.get_submodule(prefix).named_buffers(recurse=False)]:
            setattr(whole.get_submodule(prefix), name, torch.full_like(buffer, _never_set(buffer), device="cpu"))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for prefix in sorted({"", *around}, key=len, reverse=True):
            model._init_weights(whole.get_submodule(prefix))
    for prefix in later:
        _check_set(model, prefix, whole.get_submodule(prefix).named_buffers(recurse=False))
        named = whole.get_submodule(prefix).named_buffers(prefix, recurse=False)
        yield from ((name, buffer) for name, buffer in named if name not in written)


def new_head(model: PreTrainedModel, recipe: Recipe, missing: set[str]) -> set[str]:
    """Find the parameters that are initialized from scratch because `model.path` lacks them.

    These are a classifier's head and the pooler before it, without which language models are pretrained, and any other
    head if `model.new_head` is true. Other missing parameters are an error elsewhere. `missing` holds the parameters
    that are not in the files.

    Raises:
        ConfigurationError: model.new_head is true, but the files contain the head.
    """
    if not (recipe.model.new_head or has_new_head(model)):
        return set()
    new = {name for name in missing if _is_heads(model, name)}
    if recipe.model.new_head and not new:
        raise ConfigurationError(
            f"model.new_head: found true, but {recipe.model.path} has all tensors of a {type(model).__name__}, "
            "with its head, which is kept; remove the key"
        )
    return new


def _is_heads(model: PreTrainedModel, name: str) -> bool:
    if not hasattr(model, model.base_model_prefix):  # a model without a head, or whose head cannot be identified
        return False
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name
