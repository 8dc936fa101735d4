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
from samecurve.inference.generator import Writer, load
from samecurve.inference.writing import Writing
from samecurve.specs.data_names import FUNCTIONS, PREFERENCES

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.data.schemas.conversation import Conversation

BATCH = 16


@dataclass(frozen=True)
class Answer:
    """A generated function. prompt: signature and docstring. text: the output. ended: by the model, not the limit."""

    prompt: str
    text: str
    ended: bool


def run(arguments: argparse.Namespace, how: Writing) -> int:
    writer = load(arguments.run, arguments.raw)
    prompts = held_out_prompts(arguments.parse_rate, writer.recipe)
    answers = written(writer, prompts, how, arguments.seed)
    codes = [code_of(answer, writer.chat) for answer in answers]
    complete = [code for code in codes if code is not None]
    good, left_out = sum(map(is_function, complete)), len(prompts) - len(answers)
    print(f"{writer.folder}: {good} of {len(answers)} functions parse ({good / max(len(answers), 1):.1%})")
    print(f"prompts  signature and docstring, held out of {FUNCTIONS}{', as turns' if writer.chat else ''}")
    print(f"written  temperature {how.temperature:g}, seed {arguments.seed}, at most {how.max_new_tokens} tokens")
    print(
        f"ended    {len(complete)} before that; the others count as not parsed, because half a function may parse too"
    )
    if left_out:
        print(f"left out {left_out} prompts that leave the model no room for {how.max_new_tokens} tokens")
    print("counted  what ast.parse accepts as one function with a body behind its docstring")
    return 0


def held_out_prompts(count: int, recipe: Recipe | None) -> list[str]:
    """Choose `count` held-out prompts. Raises ConfigurationError if the run held out fewer."""
    if count < 1:
        raise ConfigurationError(f"--parse_rate: found {count}, at least 1 is needed")
    path, fraction = FUNCTIONS, 1.0  # a model of other data has trained on none of them
    if recipe is not None and recipe.data.path in (FUNCTIONS, PREFERENCES):
        path, fraction = recipe.data.path, sources.validation_fraction(recipe)
    source = PreferenceSource if path == PREFERENCES else FunctionSource
    documents = source(path, sources.builtin_files()).documents()
    held_out = {str(d): _prompt(d) for d in documents if sources.is_held_out(str(d), fraction)}
    if len(held_out) < count:
        raise ConfigurationError(
            f"--parse_rate: found {count}, but the run held out {len(held_out)} functions of "
            f"{FUNCTIONS} (data.validation_fraction={fraction:g}); ask for at most that many"
        )
    chosen = heapq.nsmallest(count, held_out, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [held_out[text] for text in chosen]


def _prompt(document: Conversation | Pair) -> str:
    conversation = document.chosen if isinstance(document, Pair) else document
    return conversation.messages[0]["content"]


def written(writer: Writer, prompts: Sequence[str], how: Writing, seed: int) -> list[Answer]:
    """Generate answers in batches of prompts of similar length. Prompts too long for an answer are left out."""
    torch.manual_seed(seed)
    texts = [writer.ask([{"role": "user", "content": p}]) if writer.chat else f"{p}\n" for p in prompts]
    lengths = [writer.encode([text], rendered=writer.chat)["input_ids"].shape[1] for text in texts]
    fitting = [index for index, length in enumerate(lengths) if length + how.max_new_tokens <= writer.positions]
    fitting.sort(key=lengths.__getitem__)
    answers = []
    for start in range(0, len(fitting), BATCH):
        batch = fitting[start : start + BATCH]
        found = writer.write(writer.encode([texts[index] for index in batch], rendered=writer.chat), how)
        answers += [Answer(prompts[index], *each) for index, each in zip(batch, found, strict=True)]
    return answers


def code_of(answer: Answer, chat: bool) -> str | None:
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
        return False
    return len(statements) == 1 and isinstance(statements[0], Function) and len(statements[0].body) > 1
