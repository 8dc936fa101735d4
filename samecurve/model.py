"""The model's architecture without its weights, and its weights one parameter at a time.

Every engine shards the architecture first and takes the weights after it, so no process ever holds more than one
block of the model beside its own shard, and a from-scratch model has the same weights under any sharding.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as deepspeed_integration

from . import adapter as adapters
from . import chatml
from .architecture import CAUSAL, Head, check_causal, is_classifier, model_config, reason, without_pooler
from .config import Adapter, Recipe
from .errors import ConfigurationError

Write = Callable[[str, Tensor], None]


def build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    where: AbstractContextManager,
    adapter: Adapter | None = None,
) -> PreTrainedModel:
    """An fp32 model whose weights are not set yet, constructed inside `where` (a torch.device, for example).

    adapter: with its layers beside the frozen ones, when its name says which. Raises what adapter.inject does.
    """
    with no_init_weights(), where:
        with _only_ours():
            model = model_class(config, **without_pooler(model_class))
        if adapter is not None and adapter.name:
            adapters.inject(model, adapter)
    model.tie_weights()  # no_init_weights leaves it out
    model.config.use_cache = False
    return model.train()


@contextmanager
def _only_ours() -> Iterator[None]:
    """Under ZeRO-3 `from_config`, by which transformers' classifiers make their decoder, would shard even a skeleton.

    Where weights are sharded while they are made, `where` says so. peft has to know of ZeRO-3: DoRA reads weights.
    """
    known = deepspeed_integration._hf_deepspeed_config_weak_ref
    deepspeed_integration._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed_integration._hf_deepspeed_config_weak_ref = known


def skeleton(
    recipe: Recipe, vocabulary_size: int, special_tokens: dict[str, int] | None = None, head: Head = CAUSAL
) -> PreTrainedModel:
    """The architecture alone: every tensor on the meta device, in fp32, with its full shape.

    Raises what `model_config` does, ConfigurationError also for a model that cannot be built or is not causal.
    """
    config = model_config(recipe, vocabulary_size, special_tokens, head)
    try:
        model = build(head.model_class(config), config, torch.device("meta"))
    except Exception as error:  # a package that is not there, an attention or activation that the family does not have
        raise ConfigurationError(
            f"model: transformers cannot build this {config.model_type} with model.attention {recipe.model.attention} "
            f"({reason(error)}); correct model.attention or the model's config"
        ) from error
    if head.kind == "causal_lm":
        check_causal(model)
    _check_complete(model)
    if recipe.adapter.name:
        adapters.inject(model, recipe.adapter)
        adapters.check(model, recipe.adapter)
    return model


def _check_complete(model: PreTrainedModel) -> None:
    """Only parameters are read, trained and exported; a buffer that belongs to the weights would be lost."""
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    if kept:
        raise ConfigurationError(
            f"model: {model.config.model_type} keeps trained values in buffers ({', '.join(sorted(kept)[:3])}), which "
            "are not written to an export yet; use another model_type"
        )


def describe(model: PreTrainedModel) -> dict:
    """For the header and run.json. `dropout`: the config's rates above 0, by their name there."""
    rates = {key: value for key, value in model.config.to_dict().items() if "dropout" in key or key.endswith("pdrop")}
    return {
        "model_type": model.config.model_type,
        "attention": model.config._attn_implementation,
        "dropout": {key: rate for key, rate in rates.items() if isinstance(rate, float) and rate > 0},
    }


def fill(model: PreTrainedModel, recipe: Recipe, write: Write, names: set[str] | None = None) -> None:
    """Call `write(name, tensor)` once for every parameter and buffer of the skeleton `model`, or for those in `names`.

    The tensors are full, fp32 (buffers in their own dtype) and on the CPU; tied parameters come once, under the name
    that `named_parameters()` gives. All ranks that call this see the same values in the same order.
    """
    parameters = {name for name, _ in model.named_parameters()}
    wanted = parameters if names is None else parameters & names
    written = set()
    for name, tensor in _source(model, recipe, wanted):
        write(name, tensor)
        written.add(name)
    if written != wanted:
        raise ConfigurationError(
            f"model: {model.config.model_type} keeps weights beside its layers, which cannot be initialised layer "
            f"by layer yet: {', '.join(sorted(wanted - written))}"
        )
    for name, tensor in _buffers(model):
        if names is None or name in names:
            write(name, tensor)


def _source(model: PreTrainedModel, recipe: Recipe, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    added = {name: p.shape for name, p in model.named_parameters() if name in wanted and adapters.is_adapters(name)}
    if not recipe.model.path:
        yield from _seeded(model, recipe.seed, wanted)
        return
    new = new_names(model, recipe.model.path)
    yield from _seeded(model, recipe.seed, wanted & new)
    growing = chatml.embeddings(model) if recipe.tokenizer.chat_template == chatml.CHATML else set()
    for name, tensor in _pretrained(model, recipe.model.path, wanted - added.keys() - new, growing):
        yield name, tensor
        derived = adapters.magnitude(model, name, tensor) if added else None
        if derived is not None:
            yield derived
    yield from adapters.initial(added, recipe.seed)


def _seeded(model: PreTrainedModel, seed: int, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    for prefix, unit in _units(model):
        if any(f"{prefix}.{name}" in wanted for name, _ in unit.named_parameters()):
            real = _initialised(model, prefix, unit, seed)
            yield from ((f"{prefix}.{name}", p) for name, p in _tensors(real) if f"{prefix}.{name}" in wanted)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


def _initialised(model: PreTrainedModel, prefix: str, unit: nn.Module, seed: int) -> nn.Module:
    """A CPU copy of one block, initialised by the model family's own rule with one generator state per module.

    Children come before their parents, as in transformers: GPT-2's attention overwrites what its projection drew.
    """
    real = copy.deepcopy(unit).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in reversed(list(real.named_modules())):
            key = f"{seed}:{prefix}.{name}".encode()
            # not torch.manual_seed, which would seed the GPU's generator too, and leave it so
            torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)
            model._init_weights(module)
    return real


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The blocks to initialise whole: each layer of a ModuleList, and whatever holds no ModuleList."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", layer) for index, layer in child.named_children())
        elif any(isinstance(m, nn.ModuleList) for m in child.modules()):
            yield from _units(child, path)
        else:
            yield path, child


def _buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Buffers such as rotary frequencies, which the families recompute in `_init_weights` after a meta construction."""
    for prefix, module in model.named_modules():
        if module._buffers and not any(b is None for b in module._buffers.values()):
            real = copy.deepcopy(module).to_empty(device="cpu")
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model._init_weights(real)
            yield from ((f"{prefix}.{name}" if prefix else name, b) for name, b in real.named_buffers(recurse=False))


def _pretrained(model: PreTrainedModel, path: str, wanted: set[str], growing: set[str]) -> Iterator[tuple[str, Tensor]]:
    """growing: those that may have more rows than the file, see architecture.model_config."""
    from safetensors import safe_open

    files = weight_files(path)
    for aliases in _aliases(model):
        if aliases[0] not in wanted:
            continue
        key = next((key for alias in aliases for key in _stored_names(model, alias) if key in files), None)
        if key is None:
            looked = ", ".join(aliases)
            raise ConfigurationError(f"model.path: {path} holds no tensor for {aliases[0]} (looked for {looked})")
        file, expected = files[key], model.get_parameter(aliases[0]).shape
        with safe_open(file, framework="pt") as handle:  # opened anew each time: pages of an open map stay in memory
            tensor = handle.get_tensor(key).float()
        if aliases[0] in growing and tensor.shape[0] < expected[0]:
            tensor = chatml.with_rows(tensor, expected[0])
        if tensor.shape != expected:
            raise ConfigurationError(
                f"{file}: {key} has the shape {tuple(tensor.shape)}, the config needs {tuple(expected)}"
            )
        yield aliases[0], tensor


def new_names(model: PreTrainedModel, path: str | None) -> set[str]:
    """Parameters of a classifier that its pretrained base comes without: the head's, and those of a pooler before it.

    Language models are pretrained without either. What else is missing is an error.
    """
    if path is None or not is_classifier(model):
        return set()
    files, base = weight_files(path), f"{model.base_model_prefix}."
    return {
        aliases[0]
        for aliases in _aliases(model)
        if not any(key in files for alias in aliases for key in _stored_names(model, alias))
        and (not aliases[0].startswith(base) or ".pooler." in aliases[0])
    }


def _aliases(model: PreTrainedModel) -> list[list[str]]:
    """All names of each parameter, the one of `named_parameters()` first (a tied head has two)."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return list(by_identity.values())


def _stored_names(model: PreTrainedModel, name: str) -> list[str]:
    """A checkpoint of the bare base model (GPT-2 on the hub, for example) leaves the base model's prefix out; where the
    base model is what is trained, that of one with a head has it. The first BERTs call a LayerNorm's weight gamma and
    its bias beta, which transformers reads, too."""
    name, prefix = adapters.pretrained_name(name), f"{model.base_model_prefix}."
    names = [name, name.removeprefix(prefix), prefix + name]
    layer, _, kind = name.rpartition(".")
    if layer.endswith("LayerNorm"):
        names += [other.removesuffix(kind) + {"weight": "gamma", "bias": "beta"}[kind] for other in names]
    return names


def weight_files(path: str) -> dict[str, Path]:
    """The safetensors file of each tensor of a folder or hub name. ConfigurationError where there are none."""
    from safetensors import safe_open

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["model*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {key: folder / file for key, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ConfigurationError(f"model.path: {folder} has no model.safetensors; convert the weights to safetensors")
    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), single)
