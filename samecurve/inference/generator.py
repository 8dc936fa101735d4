"""Text generation with a trained causal language model, for `chat`; and `generate`, one sample of its text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from rich.text import Text
from torch import Tensor

from samecurve.config.adapter_folder import base_path
from samecurve.data.chat_encoder import end_tokens
from samecurve.data.time_limit import render_limit
from samecurve.errors import ConfigurationError
from samecurve.inference import loading
from samecurve.inference.folders import run_directory
from samecurve.inference.generation import GenerationOptions, find_generative_model, is_chat
from samecurve.models.skeleton import construct
from samecurve.models.weights import load_weights
from samecurve.run.run_directory import SAMPLES, last_step
from samecurve.specs.data_names import BUILTIN, FUNCTIONS
from samecurve.storage.jsonl import JsonlFile
from samecurve.storage.terminal import TextConsole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from samecurve.config.schema import Recipe

FUNCTION = 'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""'
# Default prompts by the data set that a model was trained on.
PROMPTS = {BUILTIN: "import os\n\n\ndef ", FUNCTIONS: FUNCTION}
FINAL = "<|channel|>final<|message|>"  # gpt-oss's, behind which the answer stands
GREETING = "Hello! What can you do?"

Message = dict[str, str]


class _Generates(Protocol):
    """`generate` of transformers and peft: PreTrainedModel itself does not declare it."""

    def generate(self, **options: Any) -> Tensor: ...


@dataclass
class TextGenerator:
    """A causal language model with its tokenizer, ready to generate.

    Attributes:
        folder: folder of the model.
        model: the model, on the device that generates.
        tokenizer: its tokenizer.
        recipe: recipe of its training run, None if unknown.
        chat: whether prompts are turns of a chat.
        end_tokens: ids of the tokens that end a generation.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe | None
    chat: bool
    end_tokens: list[int]

    def render(self, messages: Sequence[Message]) -> str:
        """Render messages and the generation prompt. Raises ConfigurationError for a turn that the template refuses."""
        variables = self.recipe.data.chat_template_kwargs if self.recipe else {}
        try:
            with render_limit():
                text = self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, **variables
                )
        except Exception as error:  # errors of Jinja, and of any expression in the template
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(f"{self.folder}: its chat template cannot render {roles}: {error}") from error
        assert isinstance(text, str)  # of one conversation, not tokenised
        return text

    def encode(self, texts: Sequence[str], rendered: bool) -> dict[str, Tensor]:
        """Tokenise texts as a left-padded batch.

        A text of a model whose run is known begins as the run's documents did: with the token that begins a text, if
        there is one, whether or not the tokenizer adds it by itself.

        Args:
            rendered: whether the chat template rendered them; it writes the special tokens itself.

        Returns:
            input_ids and attention_mask, (len(texts), longest), on the model's device.
        """
        self.tokenizer.padding_side = "left"  # the answer continues a row's last token
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        own = self.recipe is None and not rendered  # whether the tokenizer decides
        encoded = self.tokenizer(list(texts), add_special_tokens=own)
        begin, size = self.tokenizer.bos_token_id, self.model.config.get_text_config().vocab_size
        if not own and not rendered and begin is not None and begin < size:  # others were added behind the model's back
            encoded = {"input_ids": [[begin, *row] for row in encoded["input_ids"]]}
        encoded = self.tokenizer.pad(encoded, padding=len(texts) > 1, return_tensors="pt")
        return {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}

    def generate(self, encoded: dict[str, Tensor], options: GenerationOptions, streamer=None) -> list[tuple[str, bool]]:
        """Generate a continuation of each row of what `encode` returned.

        Returns:
            For each row (generated text, whether it ended with an end token).

        Raises:
            ConfigurationError: if the prompt leaves no position of the model for an answer.
        """
        length = encoded["input_ids"].shape[1]
        room = self.positions - length
        if room < 1:
            raise ConfigurationError(
                f"the prompt has {length} tokens, but the model only {self.positions} positions; shorten the prompt"
            )
        limits = {"max_new_tokens": min(options.max_new_tokens, room), "eos_token_id": self.end_tokens or None}
        limits["pad_token_id"] = self.tokenizer.pad_token_id
        with torch.inference_mode():
            output = cast(_Generates, self.model).generate(**encoded, **options.arguments, **limits, streamer=streamer)
        rows = output[:, length:].tolist()
        ended = [any(token in self.end_tokens for token in row) for row in rows]
        return list(zip(map(self.text, rows), ended, strict=True))

    def text(self, ids: list[int]) -> str:
        """Decode generated tokens; of a chat's turn only the answer, if the turn marks where thoughts end."""
        marked = self.tokenizer.decode(ids, skip_special_tokens=False)
        if self.chat and FINAL in marked:
            mark = self.tokenizer.encode(FINAL, add_special_tokens=False)
            starts = [end for end in range(len(mark), len(ids) + 1) if ids[end - len(mark) : end] == mark]
            ids = ids[starts[-1] :] if starts else ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)  # of one sequence
        return text

    @property
    def positions(self) -> int:
        """Number of the model's positions; 2^30 for a model without a limit."""
        positions = getattr(self.model.config, "max_position_embeddings", None) or -1
        return positions if positions > 0 else 1 << 30  # configs state -1 for no limit


def load_generator(
    run: Path,
    raw: bool = False,
    untrained: bool = False,
    trust_remote_code: bool = False,
    precision: str | None = None,
) -> TextGenerator:
    """Load the model of a run or folder on the GPU, else on the CPU.

    Args:
        raw: never treat prompts as turns of a chat, but as text to continue.
        untrained: the weights with which the run began, from its recipe's seed.
        precision: see `loading.inference_dtype`.

    Raises:
        ConfigurationError: if the model is not a causal language model; with `untrained`, if its run is not known or
            began from the weights of another model.
        CheckpointError: for an adapter whose base model has changed.
    """
    folder, recipe = find_generative_model(run)
    loading.check_base_model(run, base_path(folder))
    dtype = loading.inference_dtype(precision, recipe)
    model, tokenizer = loading.load_with_tokenizer(folder, trust_remote_code=trust_remote_code, dtype=dtype)
    if untrained:
        if recipe is None or recipe.model.path:
            start = f"began from {recipe.model.path}; generate with that" if recipe else "is not known"
            raise ConfigurationError(f"--untrained: the run of {folder} {start}")
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        skeleton = construct(type(model), model.config, torch.device("meta"))

        def write(name: str, full: Tensor) -> None:
            tensors[name].copy_(full)

        with torch.no_grad():
            load_weights(skeleton, recipe, write)
    chat = not raw and is_chat(recipe, tokenizer)
    # The model's config, the tokenizer and the chat template often name different end tokens.
    ends = end_tokens(tokenizer, model.generation_config.eos_token_id, chat)
    return TextGenerator(folder, loading.to_default_device(model), tokenizer, recipe, chat, ends)


def run(arguments: argparse.Namespace, options: GenerationOptions) -> int:
    trusts = arguments.trust_remote_code
    generator = load_generator(arguments.run, arguments.raw, arguments.untrained, trusts, arguments.precision)
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
    # the token that starts a text stands for the empty prompt, and no other one before it
    encoded = generator.encode([text], rendered=generator.chat or not prompt)
    return generator.generate(encoded, options)[0][0]
