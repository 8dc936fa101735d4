"""The model of a task, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.models.hf_config import stored_config
from samecurve.models.skeleton import build_skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.interfaces.task import Task

_BLOCK = 1 << 24  # tokens that are looked at together


def skeleton_of(recipe: Recipe, task: Task) -> PreTrainedModel:
    """Build the model of a task as `build_skeleton`, and raise as it does.

    Some published tokenizers have added tokens for which the embedding has no row, such as Gemma 3 1B's for images.
    They are left out where no row has them.
    """
    size, settings = task.vocabulary_size, recipe.model
    if settings.path is not None and recipe.tokenizer.path is None and task.head.kind != "masked_lm":
        stored = stored_config(settings.path, settings.trust_remote_code, settings.revision)
        held = getattr(stored.get_text_config(), "vocab_size", size)
        size = held if held < size and _highest_id(task) < held else size
    return build_skeleton(recipe, size, task.special_tokens, task.head)


def _highest_id(task: Task) -> int:
    """Return the highest id in the task's rows, and of their padding; that of the tokenizer for a stream."""
    highest = 0
    for rows in (task.train, task.validation):
        for part in getattr(rows, "parts", (rows,)) if rows is not None else ():
            if not hasattr(part, "stream"):
                return task.vocabulary_size - 1
            tokens, highest = part.stream.tokens, max(highest, part.padding_token)
            starts = range(0, len(tokens), _BLOCK)
            highest = max([highest, *(int(tokens[start : start + _BLOCK].max()) for start in starts)])
    return highest
