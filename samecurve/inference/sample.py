"""`generate`: one text sample of a trained model."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.text import Text

from samecurve.errors import ConfigurationError
from samecurve.inference.generator import Writer, load
from samecurve.inference.writing import Writing
from samecurve.specs.data_names import BUILTIN, FUNCTIONS

FUNCTION = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""'
# Default prompts by the data set that a model was trained on.
PROMPTS = {BUILTIN: "import os\n\n\ndef ", FUNCTIONS: FUNCTION}
GREETING = "Hello! What can you do?"


def run(arguments: argparse.Namespace, how: Writing) -> int:
    writer = load(arguments.run, arguments.raw)
    prompt = default_prompt(writer) if arguments.prompt is None else arguments.prompt
    written = sample(writer, prompt, arguments.system, how, arguments.seed)
    console = Console(highlight=False, soft_wrap=True)
    as_what = "a user's turn, " if writer.chat else ""
    told = f"{writer.folder}, {as_what}seed {arguments.seed}, temperature {how.temperature:g}; the prompt is marked"
    console.print(told, markup=False)
    between = "\n" if writer.chat else ""
    if console.is_terminal:
        console.print(Text.assemble((prompt, "reverse"), between, written))
    else:
        console.print(f"[{prompt}]{between}{written}", markup=False)
    return 0


def default_prompt(writer: Writer) -> str:
    known = PROMPTS.get(writer.recipe.data.path or "") if writer.recipe else None
    return known or (GREETING if writer.chat else "")


def sample(writer: Writer, prompt: str, system: str | None, how: Writing, seed: int) -> str:
    """Generate a continuation of the prompt. The same seed gives the same text on the same machine.

    Args:
        writer: the model.
        prompt: user's turn of a chat model; otherwise the text to continue.
        system: system turn of a chat model, None without one.
        how: options of the generation.
        seed: seed of the sampling.

    Raises:
        ConfigurationError: for a system turn of a model whose prompts are not turns of a chat.
    """
    if system is not None and not writer.chat:
        raise ConfigurationError(f"--system: {writer.folder} is not asked as a chat model, so there is no system turn")
    torch.manual_seed(seed)
    if writer.chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        text = writer.ask([*turns, {"role": "user", "content": prompt}])
    else:
        start = writer.tokenizer.bos_token or writer.tokenizer.eos_token
        if not prompt and not start:
            raise ConfigurationError(f"--prompt: {writer.folder} has no token that starts a text; give a prompt")
        text = prompt or str(start)
    encoded = writer.encode([text], rendered=writer.chat)
    return writer.write(encoded, how)[0][0]
