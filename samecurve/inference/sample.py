"""`generate`: one text sample of a trained model."""

from __future__ import annotations

import argparse

import torch
from rich.text import Text

from samecurve.errors import ConfigurationError
from samecurve.inference.folders import run_directory
from samecurve.inference.generation import GenerationOptions
from samecurve.inference.generator import TextGenerator, load_generator
from samecurve.run.run_directory import SAMPLES, last_step
from samecurve.specs.data_names import BUILTIN, FUNCTIONS
from samecurve.storage.jsonl import JsonlFile
from samecurve.storage.terminal import TextConsole

FUNCTION = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""'
# Default prompts by the data set that a model was trained on.
PROMPTS = {BUILTIN: "import os\n\n\ndef ", FUNCTIONS: FUNCTION}
GREETING = "Hello! What can you do?"


def run(arguments: argparse.Namespace, options: GenerationOptions) -> int:
    generator = load_generator(arguments.run, arguments.raw, arguments.untrained, arguments.trust_remote_code)
    prompt = default_prompt(generator) if arguments.prompt is None else arguments.prompt
    text = sample(generator, prompt, arguments.system, options, arguments.seed)
    if directory := run_directory(arguments.run):
        step = 0 if arguments.untrained else last_step(directory)
        # for the report; a directory that cannot be written to is no error
        JsonlFile(directory / SAMPLES).append({"step": step, "prompt": prompt, "text": text, "seed": arguments.seed})
    console = TextConsole()
    as_what = "prompt as a user's message, " if generator.chat else ""
    which = " before training" if arguments.untrained else ""
    settings = f"{as_what}seed {arguments.seed}, temperature {options.temperature:g}"
    console.print(f"{generator.folder}{which}, {settings}; the prompt is marked")
    between = "\n" if generator.chat else ""
    if console.is_terminal:
        console.print(Text.assemble((prompt, "reverse"), between, text))
    else:
        console.print(f"[{prompt}]{between}{text}")
    return 0


def default_prompt(generator: TextGenerator) -> str:
    known = PROMPTS.get(generator.recipe.data.path or "") if generator.recipe else None
    return known or (GREETING if generator.chat else "")


def sample(generator: TextGenerator, prompt: str, system: str | None, options: GenerationOptions, seed: int) -> str:
    """Generate a continuation of the prompt, or a chat model's answer. The same seed gives the same text on a machine.

    Raises ConfigurationError for a system turn of a model whose prompts are not turns of a chat.
    """
    if system is not None and not generator.chat:
        raise ConfigurationError(f"--system: {generator.folder} gets the prompt as plain text; leave out --system")
    torch.manual_seed(seed)
    if generator.chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        text = generator.render([*turns, {"role": "user", "content": prompt}])
    else:
        start = generator.tokenizer.bos_token or generator.tokenizer.eos_token
        if not prompt and not start:
            raise ConfigurationError(f"--prompt: {generator.folder} has no token that starts a text; give a prompt")
        text = prompt or str(start)
    encoded = generator.encode([text], rendered=generator.chat)
    return generator.generate(encoded, options)[0][0]
