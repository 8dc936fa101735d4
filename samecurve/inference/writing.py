"""Options of text generation, and checks whether a model generates text. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.inference import folders
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SILENT_HEADS = ("ForSequenceClassification", "ForMaskedLM")


@dataclass(frozen=True)
class Writing:
    """Options of a generation.

    Attributes:
        max_new_tokens: largest number of generated tokens, including the end of the turn; at least 1.
        temperature: 0 or more. 0 is greedy decoding.
    """

    max_new_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        """Raise ConfigurationError for values out of range."""
        if self.max_new_tokens < 1:
            raise ConfigurationError(f"--max_new_tokens: found {self.max_new_tokens}, at least 1 is needed")
        if self.temperature < 0:
            raise ConfigurationError(f"--temperature: found {self.temperature:g}, 0 or more is needed")

    @property
    def options(self) -> dict[str, Any]:
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


def add_sampling_arguments(parser: argparse.ArgumentParser, default_temperature: float) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        default=default_temperature,
        metavar="T",
        help="sampling temperature; 0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the sampling (default: %(default)s)"
    )


def find_model(run: Path) -> tuple[Path, Recipe | None]:
    """Return the folder of a generative model, and the recipe of its run if known.

    Raises ConfigurationError if there is no model, or one that does not generate text.
    """
    folder, directory = folders.model_folder(run), folders.run_directory(run)
    recipe = folders.read_recipe(directory) if directory else None
    check_writes(run, folder, recipe)
    return folder, recipe


def check_writes(run: Path, folder: Path, recipe: Recipe | None) -> None:
    """Raise ConfigurationError for a model that does not generate text."""
    known = read_json(folder / "config.json").get("architectures") or []
    others = [name for name in known if not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))]
    if recipe is not None and TASKS[recipe.task].predicts:
        why = f"was trained by task {recipe.task}, so it writes nothing"
    elif known and len(others) == len(known) and others[0].endswith(("Model", *SILENT_HEADS)):
        why = f"holds a {others[0]}, which writes nothing"
    else:
        return
    raise ConfigurationError(
        f"{folder}: {why}; ask it by python -m samecurve predict {run}, or measure it: evaluate {run}"
    )


def is_chat(recipe: Recipe | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model's prompts are turns of a chat. With an unknown recipe (None) the chat template decides."""
    trained_on_turns = recipe is None or (TASKS[recipe.task].chats and recipe.data.chat)
    return bool(tokenizer.chat_template) and trained_on_turns
