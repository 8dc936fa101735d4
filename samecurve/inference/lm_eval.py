"""Runs EleutherAI's lm-evaluation-harness on an exported model, in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError, HangError
from samecurve.inference import folders, loading
from samecurve.inference.generation import is_chat
from samecurve.models.weight_files import header
from samecurve.specs.environment import IN_CLONE
from samecurve.specs.heads import CAUSAL
from samecurve.specs.precision import DTYPES
from samecurve.storage import trusted_code

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INSTALL = "pip install -c constraints.txt -r requirements-eval.txt" if IN_CLONE else "pip install 'samecurve[eval]'"


def run(arguments: argparse.Namespace, folder: Path, base: str | None, recipe: Recipe | None) -> int:
    """Run lm_eval on a model, or on an adapter and its `base`. Returns 0, or 1 for any failure of lm_eval.

    Raises:
        HangError: lm_eval takes longer than --timeout_minutes.
        CheckpointError: the base model has changed since the run.
    """
    loading.check_base_model(arguments.run, base)
    command = build_command(arguments, folder, base, recipe)
    print(shlex.join(command), flush=True)
    if arguments.show:
        return 0
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigurationError(f"lm_eval: not installed in {sys.prefix}; install it: {INSTALL}")
    try:
        return min(1, abs(subprocess.run(command, timeout=60 * arguments.timeout_minutes).returncode))
    except subprocess.TimeoutExpired as error:
        raise HangError(
            f"lm_eval: not finished after --timeout_minutes {arguments.timeout_minutes:g}; it was ended, give it more "
            "time or fewer examples (--limit)"
        ) from error


def build_command(arguments: argparse.Namespace, folder: Path, base: str | None, recipe: Recipe | None) -> list[str]:
    """Return lm_eval's command line, as words.

    Raises ConfigurationError without a causal language model in the folder that lm_eval can load, or if
    --harness_options is no command line.
    """
    option = arguments.trust_remote_code
    # raises for a model with another head, or with code of its own
    _, config = loading.stored_class(folder, CAUSAL, option)
    tokenizer = loading.load_tokenizer(folder, option)
    _check_loads(arguments.run, folder if base else None, config, len(tokenizer))
    trusted = trusted_code.allows(option, *filter(None, (base, str(folder))))
    model_args = {"pretrained": base or str(folder), "tokenizer": str(folder)} | ({"peft": str(folder)} if base else {})
    model_args |= {"trust_remote_code": True} if trusted else {}
    model_args["dtype"] = DTYPES[arguments.precision or (recipe.precision if recipe else "fp32")]
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", json.dumps(model_args)]
    words += [
        "--tasks",
        arguments.tasks,
        "--batch_size",
        arguments.batch_size,
        "--device",
        str(loading.default_device()),
    ]
    words += ["--output_path", str(arguments.output or (folders.run_directory(arguments.run) or folder) / "lm_eval")]
    if arguments.limit is not None:
        words += ["--limit", arguments.limit]
    if not arguments.raw and is_chat(recipe, tokenizer):
        words.append("--apply_chat_template")
    try:
        return [*words, *shlex.split(arguments.harness_options)]
    except ValueError as error:
        raise ConfigurationError(
            f"--harness_options: found {arguments.harness_options!r}, not a command line ({error})"
        ) from error


def _check_loads(run: Path, adapter: Path | None, config: PreTrainedConfig, num_tokens: int) -> None:
    """Raise ConfigurationError for a model that lm_eval (0.4.13) cannot load."""
    own = getattr(config, "auto_map", None) or {}  # classes that the folder brings
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own:
        raise ConfigurationError(
            f"{run}: lm_eval loads models with AutoModelForCausalLM, and AutoModelForCausalLM has no class for "
            f"{config.model_type}; use python -m samecurve evaluate, or serve the model (vllm serve) and give lm_eval "
            "the server (--model local-completions)"
        )
    num_rows = config.get_text_config().vocab_size
    if adapter is None or num_rows == num_tokens:
        return
    # lm_eval cuts an embedding that is padded to the tokenizer's size, and then reads the adapter
    stored = header(adapter / "adapter_model.safetensors").items()
    if whole := [name for name, entry in stored if entry.shape[:1] == (num_rows,) and ".lora_" not in name]:
        raise ConfigurationError(
            f"{run}: lm_eval cannot load this adapter, because {whole[0]} has {num_rows:,} rows and the tokenizer "
            f"{num_tokens:,} tokens; merge first: python -m samecurve merge {run}"
        )
