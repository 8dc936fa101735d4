"""Load an exported model in this process, which knows nothing of the training, and let it write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .models import load, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model")
    parser.add_argument("--prompt", default="import os\n\n\ndef ")
    parser.add_argument("--max_new_tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.5, help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    folder = model_folder(arguments.run)
    model, tokenizer = load(folder)
    written = sample(model, tokenizer, arguments)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{folder}, seed {arguments.seed}, temperature {arguments.temperature:g}; the prompt is marked")
    if console.is_terminal:
        console.print(Text.assemble((arguments.prompt, "reverse"), written))
    else:
        console.print(f"[{arguments.prompt}]{written}", markup=False)
    return 0


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> str:
    """What follows the prompt. The same seed writes the same text on the same machine."""
    import torch

    torch.manual_seed(arguments.seed)
    prompt = arguments.prompt or tokenizer.bos_token or tokenizer.eos_token
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    how = (
        {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature > 0 else {"do_sample": False}
    )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    with torch.inference_mode():
        output = model.generate(**encoded, **how, max_new_tokens=arguments.max_new_tokens, pad_token_id=pad)
    return tokenizer.decode(output[0, encoded.input_ids.shape[1] :], skip_special_tokens=True)
