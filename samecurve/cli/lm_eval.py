"""Measure a trained model on public benchmarks with EleutherAI's lm-evaluation-harness, which is installed apart.

It runs as a program of its own on the run's export (an adapter beside its base model), with the chat template where the
run trained on chats. Its tasks come from the Hugging Face hub, so their first use needs the network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.inference import loading
from samecurve.inference.generator import is_chat

INSTALL = "pip install -c constraints.txt -r requirements-eval.txt"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument(
        "tasks", metavar="TASKS", help="names as its `lm-eval ls tasks` lists them, for example arc_easy"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="to compute in; default: the recipe's precision, else fp32")
    parser.add_argument("--raw", action="store_true", help="no chat template, also for a chat model")
    parser.add_argument("--limit", metavar="N", help="only the first N examples of each task")
    parser.add_argument("--batch_size", default="8", metavar="N", help="or auto, on a GPU; default: 8")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for the results; default: RUN/lm_eval")
    parser.add_argument("--options", default="", metavar="TEXT", help="more for it: --options='--num_fewshot 5'")
    parser.add_argument("--show", action="store_true", help="print the command and do not run it")


def run(arguments: argparse.Namespace) -> int:
    """lm_eval's exit code, 1 for any failure of it."""
    found = command(arguments)
    print(shlex.join(found), flush=True)
    if arguments.show:
        return 0
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigurationError(f"lm_eval is not installed in {sys.prefix}; it is an extra: {INSTALL}")
    return min(1, abs(subprocess.run(found).returncode))


def command(arguments: argparse.Namespace) -> list[str]:
    """What is run. Raises ConfigurationError where there is no causal language model."""
    folder, directory = loading.model_folder(arguments.run), loading.run_directory(arguments.run)
    recipe = loading.recipe(directory) if directory else None
    base = loading.base_path(folder)
    trusted = loading.trusts_remote_code(folder)
    loading.check_causal(folder)
    loaded = {"pretrained": base or str(folder), "tokenizer": str(folder)} | ({"peft": str(folder)} if base else {})
    loaded |= {"trust_remote_code": True} if trusted else {}
    loaded["dtype"] = DTYPES[arguments.dtype or (recipe.precision if recipe else "fp32")]
    found = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", json.dumps(loaded)]
    found += ["--tasks", arguments.tasks, "--batch_size", arguments.batch_size, "--device", str(loading.device())]
    found += ["--output_path", str(arguments.output or (directory or folder) / "lm_eval")]
    if arguments.limit is not None:
        found += ["--limit", arguments.limit]
    if not arguments.raw and is_chat(recipe, loading.load_tokenizer(folder)):
        found.append("--apply_chat_template")
    return [*found, *_options(arguments.options)]


def _options(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--options: found {text!r}, which is no command line ({error})") from error
