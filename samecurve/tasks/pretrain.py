"""Next-token prediction on plain documents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from samecurve.data import token_store
from samecurve.data.datasets.base import PackedRows
from samecurve.tasks import causal_lm, splits

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe


def load_task(recipe: Recipe) -> causal_lm.CausalTask:
    """Load the task. Raises as `causal_lm.load_causal_task` does."""
    find_source = partial(splits.find_text, recipe)
    text_tokenizer = causal_lm.load_tokenizer(recipe, find_source)
    encoder = token_store.DocumentEncoder(text_tokenizer)
    return causal_lm.load_causal_task(recipe, text_tokenizer, encoder, find_source, PackedRows)
