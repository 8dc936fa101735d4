"""LoRA adapters, through peft: small trained matrices next to a pretrained model's frozen ones.

peft inserts its layers in place, so the model keeps its class, its blocks and its module names:

    model.layers.0.self_attn.q_proj.base_layer.weight        frozen, the pretrained q_proj.weight
    model.layers.0.self_attn.q_proj.lora_A.default.weight    trained, (rank, in_features)
    model.layers.0.self_attn.q_proj.lora_B.default.weight    trained, (out_features, rank)
    model.layers.0.mlp.experts.base_layer.down_proj          frozen, (experts, ...), of adapter.target_parameters
    model.layers.0.mlp.experts.lora_A.default.weight         trained, (experts * rank, in_features)
    model.layers.0.mlp.experts.lora_B.default.weight         trained, (out_features, rank * experts)
    score.weight                                             trained, the new head of a classifier

LoRA: Hu et al. 2021, arXiv:2106.09685. rsLoRA: Kalajdzievski 2023, arXiv:2312.03732. DoRA: Liu et al. 2024,
arXiv:2402.09353.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from samecurve.config.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, unusual_settings
from samecurve.errors import ConfigurationError
from samecurve.models import dequantize
from samecurve.models.hf_config import has_new_head, kind_of, without_pooler
from samecurve.models.packaged import package_of
from samecurve.models.weight_files import fingerprint, header

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from samecurve.config.schema import Adapter

NAME = "default"  # peft's name of a model's only adapter
_SHOWN = 4  # names in a message
_STORED = "base_model.model."  # peft's prefix of every name in its file
# peft's task types; there is none for masked language models.
TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MAGNITUDE = f".lora_magnitude_vector.{NAME}.weight"


def silence_imports() -> None:
    """Silence what peft imports, before it does: bitsandbytes and DeepSpeed, if they are installed.

    On a CPU the one warns about a faster kernel that is available only from a hub, the other that it found no GPU.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def inject(model: PreTrainedModel, settings: Adapter, revision: str | None = None) -> None:
    """Insert the adapter's uninitialized layers into `model`, in place, and freeze all else except `whole_modules`.

    Args:
        revision: the model's on the hub, for adapter_config.json.

    Raises:
        ConfigurationError: adapter.target_modules matches nothing or a layer that cannot be adapted, or the adapter in
            adapter.path is of a kind that is not trained here.
    """
    silence_imports()
    from peft import inject_adapter_in_model

    whole, twice = whole_modules(model, settings), stored_twice(model)
    edges = {name.removesuffix(".weight").removeprefix(_STORED) for pair in twice.items() for name in pair}
    if ties := not edges.isdisjoint(whole):  # one weight, which has the embedding's name
        whole = [*(name.removesuffix(".weight") for name in twice), *(name for name in whole if name not in edges)]
    config = _peft_config(model, settings, whole, ties)
    config.revision = revision
    try:
        with warnings.catch_warnings():
            # about GPT-2's Conv1D, which peft detects by itself, layer by layer
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        chosen = _format_targets(settings.target_modules)
        raise ConfigurationError(f"adapter.target_modules: found {chosen}; {error}") from error
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    config.modules_to_save, config.ensure_weight_tying = whole or None, ties
    vars(model)["loraplus_lr_ratio"] = settings.loraplus_lr_ratio


def _peft_config(model: PreTrainedModel, settings: Adapter, whole: list[str], ties: bool) -> LoraConfig:
    """Build the config of an adapter. ties: an embedding that is also the output head is trained in full."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    chosen, stored = settings.target_modules, unusual_settings(Path(settings.path)) if settings.path else {}
    if not stored.pop("ensure_weight_tying", False) and settings.path and ties:
        text = "trained the embedding or the output head apart from the other, and this model ties the two"
        fix = "train it in peft with ensure_weight_tying=True, or untie the model"
        raise ConfigurationError(f"adapter.path: the adapter in {settings.path} {text}; {fix}")
    parts = [name for name, _ in model.named_modules() if any(f"{name}.".startswith(f"{prefix}.") for prefix in whole)]
    # Linear by class alone: Llama 4's router returns a tuple, and DeepSeek-V4's groups multiply other inputs
    parts += [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search("Router|Grouped", type(module).__name__)
    ]
    excluded = stored.get("exclude_modules") or []
    by_pattern = isinstance(excluded, str)
    given = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": chosen if isinstance(chosen, str) else list(chosen),
        "target_parameters": list(settings.target_parameters or ()) or None,
        # names such as `dense` would match inside of what is trained in full, too
        "exclude_modules": "|".join([excluded, *map(re.escape, parts)]) if by_pattern else [*parts, *excluded] or None,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
        "init_lora_weights": False,  # under ZeRO-3 there is nothing to initialize yet; see `initial_matrices`
        "task_type": TASK_TYPES.get(kind_of(model)),
    }
    return LoraConfig(**{**stored, **given})


def whole_modules(model: PreTrainedModel, settings: Adapter) -> list[str]:
    """List the modules that an adapted model trains in full, as peft's `modules_to_save`.

    These are the recipe's, a classifier's modules after its base model, and a pooler inside the base model. Most
    pretrained models come without the latter, and randomly initialized weights have nothing to adapt. Of an adapter
    that goes on these are the stored ones alone.
    """
    modules = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    named = settings.modules_to_save or ()
    # peft matches any ending: `norm` is input_layernorm, too
    whole = [name for name in modules if (name.endswith(tuple(named)) if settings.path else _is_named(name, named))]
    if has_new_head(model) and not settings.path:
        base = model.base_model_prefix
        whole += [name for name, _ in model.named_children() if name != base and name in modules]
        whole += [name for name in modules if name.startswith(f"{base}.") and name.endswith(".pooler")]
    return list(dict.fromkeys(whole))


def _is_named(path: str, names: Sequence[str]) -> bool:
    """Whether a dotted path ends with one of the names."""
    return any(f".{path}".endswith(f".{name}") for name in names)


def check_targets(model: PreTrainedModel, settings: Adapter) -> None:
    """Check targets that peft accepts.

    Raises:
        ConfigurationError: a name matches no layer, or an embedding, a tied head or experts are adapted.
    """
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    in_full: Sequence[str] = cast(Any, model.peft_config[NAME]).modules_to_save or ()
    unknown = [last for last in settings.modules_to_save or () if not any(_is_named(name, [last]) for name in in_full)]
    if unknown and not settings.path:  # peft itself stores the heads of all families
        edges = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.Linear)]
        names = sorted({name.rpartition(".")[2] for name in edges if name not in adapted and ".lora_" not in name})
        raise ConfigurationError(
            f"adapter.modules_to_save: this {model.config.model_type} has no module of its own called "
            f"{', '.join(unknown)}; it has {', '.join(names)}"
        )
    whole = [name for name, module in adapted.items() if hasattr(module, "parameter_name")]
    # peft 0.21 adds these by itself if all-linear or experts are given for a Mixtral or a Qwen2-MoE
    if whole and not settings.target_parameters:
        linear = ", ".join(sorted({name.rpartition(".")[2] for name in adapted.keys() - set(whole)} & _ATTENTION))
        raise ConfigurationError(
            f"adapter.target_modules: {_format_targets(settings.target_modules)} matches {whole[0]} of this "
            f"{model.config.model_type}, which are the weights of experts or of a router; name the linear layers of "
            f"attention instead: [{linear or 'q_proj, v_proj'}], and experts in adapter.target_parameters"
        )
    if settings.target_parameters:
        _check_parameters(model, settings.target_parameters, [adapted[name] for name in whole])
    if not isinstance(settings.target_modules, str) and not settings.path:
        idle = [name for name in settings.target_modules if not any(_is_named(key, [name]) for key in adapted)]
        if idle:
            from transformers.pytorch_utils import Conv1D

            linear = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
            parts = {name.removesuffix(".base_layer").rpartition(".")[2] for name in linear if ".lora_" not in name}
            head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
            head |= {name.rpartition(".")[2] for name in in_full}
            raise ConfigurationError(
                f"adapter.target_modules: no layer of this {model.config.model_type} is called {', '.join(idle)}; "
                f"it has {', '.join(sorted(parts - head))}"
            )
    output = model.get_output_embeddings()
    tied = output is not None and model.get_input_embeddings().weight is output.weight
    for name, module in adapted.items():
        head = tied and module is output
        if head or isinstance(module.base_layer, nn.Embedding):
            raise ConfigurationError(
                f"adapter.target_modules: {name} is {'tied to the token embedding' if head else 'an embedding'}, which "
                "is not adapted here; name linear layers, or all-linear, and embeddings in adapter.modules_to_save"
            )
    if settings.path:
        _check_stored(model, Path(settings.path))


def _check_parameters(model: PreTrainedModel, names: Sequence[str], wrappers: list[Any]) -> None:
    """Check that every name of adapter.target_parameters is adapted, and no weight of another one's."""
    adapted = [f"{name}.{module.parameter_name}" for name, module in model.named_modules() if module in wrappers]
    adapted = [re.sub(r"(\.base_layer)+\.", ".", name) for name in adapted]
    idle = [name for name in names if not any(_is_named(path, [name]) for path in adapted)]
    if idle:
        paths = [(name.split(".")[-2:], p) for name, p in model.named_parameters() if ".lora_" not in name]
        stacks = sorted({".".join(path) for path, p in paths if p.dim() == 3})
        raise ConfigurationError(
            f"adapter.target_parameters: no weight of this {model.config.model_type} is called {', '.join(idle)}; "
            f"{'its stacks of experts are ' + ', '.join(stacks) if stacks else 'it has no stacks of experts'}"
        )


def is_adapted(model: nn.Module) -> bool:
    return any(name.endswith(".base_layer") for name, _ in model.named_modules())


def trained_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Collect the shapes of trained parameters by name; checkpoints hold these alone."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def pretrained_name(name: str) -> str:
    """Return a parameter's name in the files of the base model."""
    return re.sub(r"(\.base_layer)+\.", ".", name)  # a layer with several adapted weights has several around it


def is_adapter_weight(name: str) -> bool:
    return f".{NAME}." in name and ".lora_" in name


def initial_matrices(shapes: dict[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's initial matrices, full and fp32, distributed as in peft: A uniform, B zero.

    Each name has its own generator, so the values are the same under any sharding. `shapes` holds the wanted matrices'
    shapes by name.
    """
    for name, shape in shapes.items():
        if ".lora_B." in name:
            yield name, torch.zeros(shape)
        elif ".lora_A." in name:
            key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            # kaiming_uniform_ with a = sqrt(5), nn.Linear's own: a bound of 1 / sqrt(in_features)
            bound = 1 / math.sqrt(shape[1])
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)


def initial_magnitude(model: PreTrainedModel, name: str, weight: Tensor) -> tuple[str, Tensor] | None:
    """Compute DoRA's initial magnitudes (out_features,) for the frozen weight `name`; None for other parameters.

    The magnitudes are the norms of the weight's rows, because B starts at 0.
    """
    prefix, separator, last = name.rpartition(".base_layer.")
    module: Any = model.get_submodule(prefix) if separator and last == "weight" else None  # a layer of peft
    if module is None or NAME not in module.lora_magnitude_vector:
        return None
    rows = weight.T if module.fan_in_fan_out else weight
    return prefix + _MAGNITUDE, torch.linalg.norm(rows, dim=1)


def stored_config(model: PreTrainedModel) -> LoraConfig:
    """Build the content of adapter_config.json: the base model's path, adapted layers, and layers stored in full."""
    from peft import LoraConfig

    config = copy.deepcopy(model.peft_config[NAME])
    assert isinstance(config, LoraConfig)  # as `inject` made it
    # peft looks from the working directory, too: no path of this machine below it; see inference/folders.py
    path, here = model.config._name_or_path, Path.cwd()
    absolute = Path(path).resolve()
    inside = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    config.base_model_name_or_path = str(inside) if absolute.is_dir() else path
    if without_pooler(type(model)):  # AutoModel creates a pooler, which target names such as `dense` would match
        config.exclude_modules = ["pooler.dense"]
    if package := package_of(model):
        # the published class has layers of the same names in its towers
        own = "|".join(re.escape(published) for _, published in package.prefixes)
        excluded = [re.escape(package.name(name)) for name in config.exclude_modules or ()]
        config.exclude_modules = "|".join([rf"(?!{own}).*", *excluded])
        # peft replaces all-linear by whole names; a pattern may have been written for the text model's
        adapted = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
        targets = adapted if isinstance(config.target_modules, str) else config.target_modules or ()
        config.target_modules = sorted(package.name(name) if name in adapted else name for name in targets)
    config.init_lora_weights = True  # peft's default; `inject` needed False
    config.inference_mode = True  # as peft's save_pretrained writes it
    return config


def stored_names(model: PreTrainedModel) -> dict[str, str]:
    """Map each trained parameter's name to peft's name in adapter_model.safetensors.

    Of the text part of a packaged model: to the name in the published class.
    """
    from peft import get_peft_model_state_dict

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = {name: p for name, p in trained.items() if is_adapter_weight(name)}
    # save_embedding_layers="auto" would look for the base model's config on the hub
    stored = get_peft_model_state_dict(model, named, NAME, save_embedding_layers=False)
    names = {id(parameter): name for name, parameter in stored.items()}
    package = package_of(model)
    stored_as = {name: names.get(id(parameter), name) for name, parameter in trained.items()}
    return {name: _STORED + (package.name(inner) if package else inner) for name, inner in stored_as.items()}


def stored_twice(model: PreTrainedModel) -> dict[str, str]:
    """Map the trained weight that embedding and output head share, if there is one, to its second name in the file."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not table.weight or not table.weight.requires_grad:
        return {}
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    return {names[table]: _STORED + names[head]}


def _check_stored(model: PreTrainedModel, folder: Path) -> None:
    """Check that a stored adapter has the tensors of an adapted model, and no others.

    Raises:
        ConfigurationError: lists what differs, or the file is damaged.
    """
    stored, problems = header(folder / ADAPTER_WEIGHTS), []
    wanted = {of_peft: model.get_parameter(name).shape for name, of_peft in stored_names(model).items()}
    wanted |= {of_peft: model.get_parameter(name).shape for name, of_peft in stored_twice(model).items()}
    extra = stored.keys() - wanted.keys()
    for text, names in (("has no", wanted.keys() - stored.keys()), ("also has", extra)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(f"{text} {', '.join(sorted(names)[:_SHOWN])}{more}")
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].shape != wanted[name]:
            problems.append(f"its {name} is {tuple(stored[name].shape)}, this model's {tuple(wanted[name])}")
    if problems:
        raise ConfigurationError(
            f"adapter.path: {folder / ADAPTER_WEIGHTS} is not an adapter of this {model.config.model_type} as its "
            f"{ADAPTER_CONFIG} describes it: it {'; '.join(problems[:_SHOWN])}. Is model.path its base model? Rows of "
            "new tokens in an embedding can be trained only where modules_to_save names it"
        )


def stored_tensors(model: PreTrainedModel, folder: Path, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield those of a stored adapter's tensors that are wanted, by the model's names and in fp32."""
    stored = header(folder / ADAPTER_WEIGHTS)
    for name, of_peft in stored_names(model).items():
        if name in wanted:
            tensor = dequantize.read(stored, [of_peft])[of_peft].float()
            dequantize.check_finite(stored[of_peft], of_peft, tensor)
            yield name, tensor


def stored_tensor_names(folder: Path) -> set[str]:
    """Collect the tensor names in an adapter's folder, without peft's prefix.

    Raises:
        ConfigurationError: the file is damaged.
    """
    path = folder / ADAPTER_WEIGHTS
    return {name.removeprefix(_STORED) for name in header(path)} if path.is_file() else set()


def start_of(settings: Adapter) -> str | None:
    """Compute the fingerprint of the weights in `adapter.path`; None for a new adapter."""
    return fingerprint(header(Path(settings.path) / ADAPTER_WEIGHTS)) if settings.path else None


def _format_targets(value) -> str:
    return repr(value) if isinstance(value, str) else ", ".join(value)
