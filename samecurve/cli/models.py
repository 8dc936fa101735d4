"""Exported models as the commands find and load them: whole ones, and adapters beside the model that they adapt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_CONFIG = "adapter_config.json"


def model_folder(run: Path) -> Path:
    """Raises ConfigurationError when neither RUN/model nor RUN holds a model or an adapter."""
    for folder in (run / "model", run):
        if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return folder
    raise ConfigurationError(
        f"neither {run / 'model'} nor {run} holds an exported model (config.json or {ADAPTER_CONFIG})"
    )


def base_path(folder: Path) -> str | None:
    """Where the model is that an adapter's folder adapts; None for a whole model's. ConfigurationError when unsaid."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: names no base_model_name_or_path ({error})") from error


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in fp32 and with its adapter where the folder holds one, and its tokenizer."""
    base = base_path(folder)
    _quiet()
    from transformers import AutoTokenizer

    model = load_model(base or str(folder))
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def load_model(path: str) -> PreTrainedModel:
    """A whole model in fp32. Raises ConfigurationError when there is none."""
    _quiet()
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: no model can be loaded from there ({error})") from error


def _quiet() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
