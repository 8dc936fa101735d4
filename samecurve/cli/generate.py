"""Load an exported model in this process, which knows nothing of the training, and let it write.

A model that was trained on chats answers the prompt as a user's turn (--raw: continues it as text); others continue it.
An adapter is put beside its base model on the fly.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from samecurve.errors import ConfigurationError
from samecurve.inference.generator import Writer, Writing, load
from samecurve.specs.data_names import BUILTIN, FUNCTIONS

LONGEST = 120
FUNCTION = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""'
# What fits what a model was trained on, where that is known.
PROMPTS = {BUILTIN: "import os\n\n\ndef ", FUNCTIONS: FUNCTION}
GREETING = "Hello! What can you do?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("--prompt", help="default: one that fits what the run was trained on")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before the prompt, for a chat model")
    parser.add_argument("--raw", action="store_true", help="no chat template: the prompt is text to be continued")
    parser.add_argument("--max_new_tokens", type=int, help=f"default: {LONGEST}; 256 with --parse_rate")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token; default: 0.5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parse_rate",
        metavar="N",
        type=int,
        help="instead of one sample: write the bodies of N functions of the Python library that were held out of "
        "builtin:python-functions, and print how many of them Python can parse",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.parse_rate is not None:
        from samecurve.bench.parse_rate import run as measure

        return measure(arguments)
    how = Writing(_or(arguments.max_new_tokens, LONGEST), _or(arguments.temperature, 0.5))
    writer = load(arguments.run, arguments.raw)
    prompt = _or(arguments.prompt, default_prompt(writer))
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
    known = PROMPTS.get(writer.recipe.data.path) if writer.recipe else None
    return known or (GREETING if writer.chat else "")


def sample(writer: Writer, prompt: str, system: str | None, how: Writing, seed: int) -> str:
    """What follows the prompt. The same seed writes the same text on the same machine."""
    import torch

    if system is not None and not writer.chat:
        raise ConfigurationError(f"--system: {writer.folder} is not asked as a chat model, so there is no system turn")
    torch.manual_seed(seed)
    if writer.chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        text = writer.ask([*turns, {"role": "user", "content": prompt}])
    else:
        text = prompt or writer.tokenizer.bos_token or writer.tokenizer.eos_token
    encoded = writer.encode([text], rendered=writer.chat)
    return writer.write(encoded, how)[0][0]


def _or(given, default):
    return default if given is None else given
