"""Process rewards: whether each step of a solution is right, read at the end of the step (arXiv:2305.20050)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from samecurve.data.schemas.token_labels import STEP_NAMES, StepEncoder
from samecurve.tasks.token_classify import TokenTask, load_labelled_words

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe


def load_task(recipe: Recipe) -> TokenTask:
    """Load the task. Raises as `classify.load_task` does."""
    separator = recipe.process_reward.step_separator
    return load_labelled_words(recipe, STEP_NAMES, partial(StepEncoder, separator=separator))
