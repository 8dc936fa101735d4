"""Loads exported models for the commands: whole models, and adapters with their base model."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.logging import disable_progress_bar

from samecurve.config.adapter_folder import base_path
from samecurve.config.schema import Recipe
from samecurve.errors import CheckpointError, ConfigurationError, SamecurveError
from samecurve.export.model_card import ADAPTED_CONFIG
from samecurve.inference.folders import ran_own_code, run_directory
from samecurve.models import lora
from samecurve.models.hf_config import check_sizes, find_class, kind_of_stored, without_pooler
from samecurve.models.weight_files import fingerprint, indexed_files, weight_files
from samecurve.specs.heads import CAUSAL, TITLES, Head
from samecurve.specs.precision import torch_dtype
from samecurve.storage import trusted_code
from samecurve.storage.checksums import check_checksums
from samecurve.storage.records import read_record

_TOKENIZER = {"model_max_length?": (float, None)}


def check_base_model(path: Path, base: str | None) -> None:
    """Raise CheckpointError if the base model of an adapter has changed since the run that `path` belongs to.

    There is no check without a run, or without an adapter (base None).
    """
    run = run_directory(path)
    if run is None or base is None:
        return
    record = read_record(run / "run.json", {"adapter?": ({"base_model?": (str, None)}, None)})
    if record.is_damaged:
        print(
            f"{record.path}: {record.problem}; whether {base} has changed since the run is not known", file=sys.stderr
        )
    known = ((record.value or {}).get("adapter") or {}).get("base_model")
    if known is None:
        return
    if fingerprint(weight_files(base)) != known:
        raise CheckpointError(f"{base}: the base model's weights have changed since {run}; restore the same weights")


def load_with_tokenizer(
    folder: Path,
    head: Head | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, with its adapter if the folder holds one, and its tokenizer. See `load_model`."""
    base = _base_path(folder, trust_remote_code)
    if base is not None:
        check_checksums(Path(base))
    tokenizer = load_tokenizer(folder, trust_remote_code)
    if base is None:
        return load_model(str(folder), head, attention, trust_remote_code, dtype=dtype), tokenizer
    model = load_model(base, head, attention, trust_remote_code, folder, dtype)
    from peft import PeftModel  # slow to import, and noisy unless `load_model` ran before it

    with warnings.catch_warnings():
        # The model is built without the pooler that exclude_modules names.
        warnings.filterwarnings("ignore", message="You have passed exclude_modules")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        with _loading(folder, "the adapter"):
            adapted = PeftModel.from_pretrained(model, folder).eval()
    # peft's wrapper is no PreTrainedModel, but forwards every attribute and call to the one inside.
    return cast(PreTrainedModel, adapted), tokenizer


def _base_path(folder: Path, trust_remote_code: bool) -> str | None:
    """Return `base_path`. Raises ConfigurationError where the run trained the model's own code, which may not run here.

    transformers may have a class for a model of that type, and would silently load that one instead.
    """
    base = base_path(folder)
    path = base or str(folder)
    if ran_own_code(folder) and trusted_code.modules(path) and not trusted_code.allows(trust_remote_code, path):
        raise ConfigurationError(trusted_code.refusal(path))
    return base


def stored_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of a model, or of an adapter's base model. Raises ConfigurationError if there is none."""
    base = _base_path(folder, trust_remote_code)
    return _load_config(_config_path(base or str(folder), folder), trust_remote_code)


def stored_head(folder: Path, trust_remote_code: bool = False) -> Head:
    """Return the kind of head of an exported model or adapter."""
    return Head(kind_of_stored(stored_config(folder, trust_remote_code)))


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. Raises ConfigurationError if the folder holds none, or its code may not run."""
    trusted = trusted_code.allows(trust_remote_code, str(folder))
    read_record(folder / "tokenizer_config.json", _TOKENIZER).optional(ConfigurationError, "correct it")
    with _loading(folder, "the tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def load_model(
    path: str,
    head: Head | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load a whole model on the CPU.

    Args:
        head: expected head; default: causal language model.
        attention: as model.attention in a recipe.
        trust_remote_code: run the model's own code even if it is not in the user's list.
        adapter: folder of an adapter that will be added, and may contain the head.
        dtype: of the weights.

    Raises:
        ConfigurationError: if there is no model, or one with another head, whose weights would be drawn at random, or
            one with code of its own that may not run.
    """
    disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_no_load_report)
    lora.silence_imports()
    head = head or CAUSAL
    more: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    model_class, config = _model_class(_config_path(path, adapter), head, trust_remote_code)
    more |= {"config": config, **without_pooler(model_class)}
    if (index := Path(path, SAFE_WEIGHTS_INDEX_NAME)).is_file():
        indexed_files(index)  # transformers would read files of other folders
    with _loading(path, "the model"):
        loaded: Any = model_class.from_pretrained(  # annotated as the model alone, without the loading info
            path,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=trusted_code.allows(trust_remote_code, path),
            **more,
        )
    model, info = loaded
    if hasattr(config, "quantization_config"):
        model._weight_conversions = None  # save_pretrained would quantize again (transformers 5.23)
        for parameter in model.parameters():  # those beside quantized ones have their stored dtype (transformers 5.23)
            parameter.data = parameter.data.to(dtype)
    missing = set(info["missing_keys"]) - (lora.stored_tensor_names(adapter) if adapter else set())
    if missing:
        names = ", ".join(sorted(missing)[:3])
        saved_as = ", ".join(config.architectures or ["another model"])
        raise ConfigurationError(f"{path}: holds {saved_as}, which is no {head.title} (no {names})")
    return model.eval()


@contextmanager
def _loading(path: str | Path, what: str) -> Iterator[None]:
    """Turn what transformers and peft raise for a folder into a ConfigurationError.

    Their exceptions are of any type: a value of another type in config.json, a size that fits no memory.
    """
    try:
        yield
    except SamecurveError:
        raise
    except UnpicklingError as error:  # its text says how to run such a file
        raise ConfigurationError(
            f"{path}: its weights are a pickle (.bin) of more than tensors, which would run code and was not read; get "
            "the model as safetensors"
        ) from error
    except Exception as error:
        if trusted_code.is_refusal(error):
            raise ConfigurationError(trusted_code.refusal(str(path))) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{path}: {what} cannot be loaded ({reason:.400})") from error


def stored_class(
    folder: Path, head: Head, trust_remote_code: bool = False
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class and the config of an exported model or adapter.

    Raises ConfigurationError if the model has another head by its config.
    """
    base = _base_path(folder, trust_remote_code)
    return _model_class(_config_path(base or str(folder), folder), head, trust_remote_code)


def class_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of a classifier's classes, in the order of its outputs."""
    names = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    return tuple(names[index] for index in sorted(names))


def _config_path(path: str, adapter: Path | None) -> str:
    """Return the path of a model's config: the adapter's copy if it changes the head, else the model itself."""
    adapted = None if adapter is None else adapter / ADAPTED_CONFIG
    return str(adapted) if adapted is not None and adapted.is_dir() else path


def _model_class(path: str, head: Head, trust_remote_code: bool) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class that loads a model, and its config. Raises ConfigurationError for a model with another head."""
    # Decided by the config, because a tied output head would be found in a classifier's weight file too.
    config = _load_config(path, trust_remote_code)
    model_class = find_class(head, config)
    others = {getattr(find_class(Head(kind), config), "__name__", None) for kind in TITLES if kind != head.kind}
    stored = set(config.architectures or ()) - {getattr(model_class, "__name__", None)}
    if model_class is None or (stored and stored <= others):
        fix = "; use python -m samecurve predict" if head.kind == "causal_lm" and stored else ""
        saved_as = ", ".join(stored) or config.model_type
        raise ConfigurationError(f"{path}: holds {saved_as}, which is no {head.title}{fix}")
    return model_class, config


def _load_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    with _loading(path, "the model"):
        check_sizes(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted_code.allows(trust_remote_code, path))
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") in ("mxfp4", "fp8"):
        stored["dequantize"] = True  # as training read them; on a GPU transformers would keep 4 or 8 bits
    kernel = config._attn_implementation or ""
    if "/" in kernel and not trust_remote_code:
        raise ConfigurationError(
            f"{path}: config.json asks for the kernel {kernel} of the hub (attn_implementation), which runs code; "
            f"remove that key, or add {trusted_code.OPTION}"
        )
    return config


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype(precision: str | None, recipe: Recipe | None) -> torch.dtype:
    """Return the dtype of `precision`; default: fp32 on a CPU, on a GPU the precision of the run, bf16 if unknown."""
    usual = "fp32" if default_device().type == "cpu" else recipe.precision if recipe else "bf16"
    return torch_dtype(precision or usual)


def to_default_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model to the GPU if there is one, else leave it on the CPU."""
    return model.to(default_device())  # pyright: ignore[reportArgumentType]  # transformers' decorator drops `self`


def _no_load_report(record: logging.LogRecord) -> bool:
    """Filter out transformers' table of missing weights; `load_model` raises for those that no adapter contains."""
    return "LOAD REPORT" not in record.getMessage()
