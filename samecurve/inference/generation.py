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
from samecurve.storage.records import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NON_GENERATIVE_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
_GENERATION = {
    **{f"{kind}_token_id?": (int, [int], None) for kind in ("bos", "eos", "pad", "decoder_start")},
    **{f"output_{what}?": (bool, None) for what in ("attentions", "hidden_states", "scores", "logits")},
}


@dataclass(frozen=True)
class GenerationOptions:
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
            raise ConfigurationError(f"--max_new_tokens: found {self.max_new_tokens}, but it must be at least 1")
        if self.temperature < 0:
            raise ConfigurationError(f"--temperature: found {self.temperature:g}, but it must be 0 or more")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `generate` of transformers."""
        # transformers refuses to sample at temperature 0
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


def find_generative_model(run: Path) -> tuple[Path, Recipe | None]:
    """Return the folder of a generative model, and the recipe of its run if known.

    Raises ConfigurationError if there is no model, or one that does not generate text.
    """
    folder, recipe = folders.model_folder(run), folders.known_recipe(run)
    check_generates(run, folder, recipe)
    return folder, recipe


def check_generates(run: Path, folder: Path, recipe: Recipe | None) -> None:
    """Raise ConfigurationError for a model that does not generate text."""
    config = read_record(folder / "config.json", {"architectures?": ([str], None)})
    known = config.optional(ConfigurationError, "restore it").get("architectures") or []
    read_record(folder / "generation_config.json", _GENERATION).optional(ConfigurationError, "correct it")
    others = [name for name in known if not name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))]
    if recipe is not None and TASKS[recipe.task].predicts:
        why = f"the model was trained by task {recipe.task}"
    elif known and len(others) == len(known) and others[0].endswith(("Model", *NON_GENERATIVE_HEADS)):
        why = f"the model is a {others[0]}"
    else:
        return
    raise ConfigurationError(
        f"{folder}: {why}, which does not generate text; use python -m samecurve predict {run}, or evaluate {run}"
    )


def is_chat(recipe: Recipe | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model's prompts are turns of a chat. With an unknown recipe (None) the chat template decides."""
    trained_on_turns = recipe is None or (TASKS[recipe.task].chats and recipe.data.chat)
    return bool(tokenizer.chat_template) and trained_on_turns
