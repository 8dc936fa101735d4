"""Runs and exported models as the commands find and load them: whole models, and adapters beside the one they adapt."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.errors import CheckpointError, ConfigurationError
from samecurve.storage.atomic import read_json
from samecurve.strategy import preflight

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from samecurve.config.schema import Recipe
    from samecurve.models.hf_config import Head

ADAPTER_CONFIG = "adapter_config.json"


def model_folder(run: Path) -> Path:
    """Raises ConfigurationError when neither RUN/model nor RUN holds a model or an adapter."""
    for folder in (run / "model", run):
        if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return folder
    if any((run / "checkpoints").glob("step_*")):
        raise ConfigurationError(
            f"{run} holds checkpoints and no exported model yet; let the run end, or make a model of its newest "
            f"checkpoint: python -m samecurve export {run}"
        )
    raise ConfigurationError(
        f"neither {run / 'model'} nor {run} holds an exported model (config.json or {ADAPTER_CONFIG})"
    )


def run_directory(path: Path) -> Path | None:
    """Where run.json is, for a run directory and for a folder in one, such as RUN/model. None: no run is known."""
    return next((folder for folder in (path, path.absolute().parent) if (folder / "run.json").is_file()), None)


def recipe(run: Path) -> Recipe:
    """What run.json says was trained. Errors: see recipe_of."""
    return recipe_of(read_json(run / "run.json"), run / "run.json")


def recipe_of(facts: dict, file: Path) -> Recipe:
    """facts: the content of `file`. Raises ConfigurationError when no recipe of this version is in it."""
    from pydantic import ValidationError

    from samecurve.config.renamed_keys import in_new_names
    from samecurve.config.schema import Recipe

    if "recipe" not in facts:
        raise ConfigurationError(f"{file}: holds no recipe; give a run's output_dir")
    try:
        return Recipe.model_validate(in_new_names(facts)["recipe"])
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        wrote = facts.get("versions", {}).get("samecurve") or "unknown"
        raise ConfigurationError(f"{file}: not a recipe of this version ({keys}); version {wrote} wrote it") from error


def trusts_remote_code(folder: Path) -> bool:
    """Whether the run that `folder` is of ran the model's own Python files (model.trust_remote_code).

    A folder alone, of which no run is known, is not trusted.
    """
    directory = run_directory(folder)
    facts = read_json(directory / "run.json") if directory else {}
    return bool(facts.get("recipe", {}).get("model", {}).get("trust_remote_code"))


def base_path(folder: Path) -> str | None:
    """Where the model is that an adapter's folder adapts; None for a whole model's.

    Raises ConfigurationError when it does not say, and for a folder that is gone.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: names no base_model_name_or_path ({error})") from error
    is_folder = base.startswith((".", "/", "~")) or base.count("/") > 1  # a hub name is OWNER/NAME
    if is_folder and not Path(base).is_dir():
        raise ConfigurationError(
            f"{path}: the model that it adapts is gone: no such folder: {base}; put it back, or change "
            "base_model_name_or_path there to where it lies now"
        )
    return base


def check_base(run: Path, base: str) -> None:
    """Raises CheckpointError when the base model has changed since the run. A folder alone does not know."""
    known = (read_json(run / "run.json").get("adapter") or {}).get("base_model")
    if known is None:
        return
    from samecurve.models.lora import fingerprint
    from samecurve.models.weight_files import weight_files

    if fingerprint(weight_files(base)) != known:
        raise CheckpointError(f"{base}: its weights are not those that {run} adapted; put the same model there")


def load(
    folder: Path, head: Head | None = None, attention: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in fp32 and with its adapter where the folder holds one, and its tokenizer. See load_model."""
    base = base_path(folder)
    if base is None:
        return load_model(str(folder), head, attention, trusts_remote_code(folder)), load_tokenizer(folder)
    from samecurve.models.lora import quiet

    quiet()
    from peft import PeftModel

    model = load_model(base, head, attention, trusts_remote_code(folder), folder)
    with warnings.catch_warnings():
        # ours is made without the pooler that is told to be left alone
        warnings.filterwarnings("ignore", message="You have passed exclude_modules")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return PeftModel.from_pretrained(model, folder).eval(), load_tokenizer(folder)


def stored_config(folder: Path) -> PreTrainedConfig:
    """Of a model, or of a base model with its adapter. ConfigurationError when there is none."""
    base = base_path(folder)
    return _config(_described(base or str(folder), folder), trusts_remote_code(folder))


def stored_head(folder: Path) -> Head:
    """What the model of an export or an adapter ends in."""
    from samecurve.models.hf_config import Head, kind_of_stored

    return Head(kind_of_stored(stored_config(folder)))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises ConfigurationError when the folder holds none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_remote_code(folder))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: no tokenizer can be loaded from there ({error})") from error


def load_model(
    path: str,
    head: Head | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
) -> PreTrainedModel:
    """A whole model in fp32 on the CPU.

    head: what it ends in, a causal language model's by default. attention, trust_remote_code: as in a recipe's model.
    adapter: the folder of one that is to be put beside it, and may bring the head.
    Raises ConfigurationError when there is no model, or one with another head: its own would be drawn at random.
    """
    _quiet()
    import torch
    from safetensors import SafetensorError

    from samecurve.models.hf_config import CAUSAL, without_pooler
    from samecurve.models.lora import brought

    head = head or CAUSAL
    more = {} if attention is None else {"attn_implementation": attention}
    model_class, config = _class(_described(path, adapter), head, trust_remote_code)
    more |= {"config": config, **without_pooler(model_class)}
    try:
        model, found = model_class.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code, **more
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: no model can be loaded from there ({error})") from error
    missing = set(found["missing_keys"]) - (brought(adapter) if adapter else set())
    if missing:
        names = ", ".join(sorted(missing)[:3])
        made_as = ", ".join(config.architectures or ["another one"])
        raise ConfigurationError(f"{path}: holds no {head.title} ({names} is missing): it was made as {made_as}")
    return model.eval()


def check_causal(folder: Path) -> None:
    """Raises ConfigurationError for a model, or an adapter's, that is no causal language model; its weights are not
    looked at."""
    from samecurve.models.hf_config import CAUSAL

    _class(_described(base_path(folder) or str(folder), folder), CAUSAL, trusts_remote_code(folder))


def _described(path: str, adapter: Path | None) -> str:
    """Where the config of a model is: an adapter that gives its model another head has it, else the model itself."""
    from samecurve.export.model_card import ADAPTED_CONFIG

    found = None if adapter is None else adapter / ADAPTED_CONFIG
    return str(found) if found is not None and found.is_dir() else path


def _class(path: str, head: Head, trust_remote_code: bool) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """What loads it. A tied output head would be found in a classifier's file, too, so the config is asked."""
    from samecurve.models.hf_config import KINDS, Head

    config = _config(path, trust_remote_code)
    model_class = head.model_class(config)
    others = {getattr(Head(kind).model_class(config), "__name__", None) for kind in KINDS if kind != head.kind}
    stored = set(config.architectures or ()) - {getattr(model_class, "__name__", None)}
    if model_class is None or (stored and stored <= others):
        fix = "; ask it by python -m samecurve predict" if head.kind == "causal_lm" and stored else ""
        made_as = ", ".join(stored) or config.model_type
        raise ConfigurationError(f"{path}: holds a {made_as}, which is no {head.title}{fix}")
    return model_class, config


def _config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        fix = ""
        if "trust_remote_code" in str(error):
            fix = "; it has Python files of its own, and no run whose recipe has model.trust_remote_code is known here"
        raise ConfigurationError(f"{path}: no model can be loaded from there ({error}){fix}") from error


def device() -> torch.device:
    """The GPU where there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _quiet() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(_no_load_report)
    # peft imports it where it is installed, and on a CPU it warns of a faster kernel that only a hub has
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    preflight.quiet_libraries()


def _no_load_report(record: logging.LogRecord) -> bool:
    """Of transformers' table of missing weights: `load_model` raises for those that an adapter does not bring."""
    return "LOAD REPORT" not in record.getMessage()
