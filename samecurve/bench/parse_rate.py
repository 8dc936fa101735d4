"""Parse rate, `generate --parse_rate N`: the share of functions written by a model that Python can parse.

This is a real metric that needs no download. The prompts are signatures and docstrings of the standard library that the
run held out. Those with the smallest hashes are chosen, so that the sample does not depend on the order of the files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from samecurve.data import sources
from samecurve.data.builtin import Function, FunctionSource, PreferenceSource, function
from samecurve.data.schemas.preference import Pair
from samecurve.errors import ConfigurationError
from samecurve.inference.generation import GenerationOptions
from samecurve.inference.generator import TextGenerator, load_generator
from samecurve.specs.data_names import FUNCTIONS, PREFERENCES

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

BATCH = 16


@dataclass(frozen=True)
class Answer:
    """A generated function. prompt: signature and docstring. text: the output. ended: by the model, not the limit."""

    prompt: str
    text: str
    ended: bool


def run(arguments: argparse.Namespace, options: GenerationOptions) -> int:
    generator = load_generator(arguments.run, arguments.raw, trust_remote_code=arguments.trust_remote_code)
    prompts = held_out_prompts(arguments.parse_rate, generator.recipe)
    answers = generate_functions(generator, prompts, options, arguments.seed)
    codes = [extract_function(answer, generator.chat) for answer in answers]
    complete = [code for code in codes if code is not None]
    good, left_out = sum(map(is_function, complete)), len(prompts) - len(answers)
    print(f"{generator.folder}: {good} of {len(answers)} functions parse ({good / max(len(answers), 1):.1%})")
    print(f"prompts  signature and docstring, held out of {FUNCTIONS}{', as messages' if generator.chat else ''}")
    print(
        f"written  temperature {options.temperature:g}, seed {arguments.seed}, at most {options.max_new_tokens} tokens"
    )
    print(f"complete {len(complete)}; the others reached the limit and count as not parsed")
    if left_out:
        print(f"left out {left_out} prompts that are too long for {options.max_new_tokens} more tokens")
    print("counted  what ast.parse accepts as one function with a body behind its docstring")
    return 0


def held_out_prompts(count: int, recipe: Recipe | None) -> list[str]:
    """Choose `count` held-out prompts. Raises ConfigurationError if the run held out fewer."""
    if count < 1:
        raise ConfigurationError(f"--parse_rate: found {count}, but it must be at least 1")
    path, fraction = FUNCTIONS, 1.0  # a model of other data has trained on none of them
    if recipe is not None and recipe.data.path in (FUNCTIONS, PREFERENCES):
        path, fraction = recipe.data.path, sources.validation_fraction(recipe)
    source = PreferenceSource if path == PREFERENCES else FunctionSource
    documents = source(path, sources.builtin_files()).documents()
    held_out = {}
    for document in documents:
        if sources.is_held_out(str(document), fraction):
            conversation = document.chosen if isinstance(document, Pair) else document
            held_out[str(document)] = conversation.messages[0]["content"]
    if len(held_out) < count:
        raise ConfigurationError(
            f"--parse_rate: found {count}, but the run held out only {len(held_out)} functions "
            f"of {FUNCTIONS} (data.validation_fraction={fraction:g}); give at most that number"
        )
    chosen = heapq.nsmallest(count, held_out, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [held_out[text] for text in chosen]


def generate_functions(
    generator: TextGenerator, prompts: Sequence[str], options: GenerationOptions, seed: int
) -> list[Answer]:
    """Generate answers in batches of prompts of similar length. Prompts too long for an answer are left out.

    Args:
        prompts: signatures with docstrings.
        options: sampling, and the number of new tokens that has to fit behind a prompt.
        seed: seed of the sampling.

    Returns:
        The answers, from the shortest prompt to the longest.
    """
    torch.manual_seed(seed)
    texts = [generator.render([{"role": "user", "content": p}]) if generator.chat else f"{p}\n" for p in prompts]
    lengths = [generator.encode([text], rendered=generator.chat)["input_ids"].shape[1] for text in texts]
    fitting = [index for index, length in enumerate(lengths) if length + options.max_new_tokens <= generator.positions]
    fitting.sort(key=lengths.__getitem__)
    answers = []
    for start in range(0, len(fitting), BATCH):
        batch = fitting[start : start + BATCH]
        encoded = generator.encode([texts[index] for index in batch], rendered=generator.chat)
        outputs = generator.generate(encoded, options)
        answers += [Answer(prompts[index], *output) for index, output in zip(batch, outputs, strict=True)]
    return answers


def extract_function(answer: Answer, chat: bool) -> str | None:
    """Extract the complete function from an answer; None if it was cut off, because half of one may parse by chance.

    A chat model answers with the body as in the data, without its indentation. Other models continue after the
    function, which ends before the first line that is not indented.
    """
    if chat:
        return function(answer.prompt, answer.text) if answer.ended else None
    lines = answer.text.split("\n")
    end = next((index for index, line in enumerate(lines) if line.strip() and not line[0].isspace()), None)
    if end is None and not answer.ended:
        return None
    return "\n".join([answer.prompt, *lines[:end]]) + "\n"


def is_function(code: str) -> bool:
    """Whether ast.parse accepts it as one function with a body behind its docstring."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: a lone surrogate; RecursionError and MemoryError: code that is nested too deeply
        return False
    return len(statements) == 1 and isinstance(statements[0], Function) and len(statements[0].body) > 1
