"""Next-token prediction on plain documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.data import sources, token_store
from samecurve.data.datasets.base import DocumentRows, PackedRows
from samecurve.tasks import causal_lm

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe


def load(recipe: Recipe) -> causal_lm.CausalTask:
    """Load the task. Raises as `causal_lm.load` does."""

    def find(data: Data) -> sources.DataSource:
        return sources.find_source(data.path, data.pattern, data.text_column, sources.Selection.of(recipe, data))

    text_tokenizer = causal_lm.load_tokenizer(recipe, find)

    def make_rows(stream: token_store.TokenStream) -> PackedRows | DocumentRows:
        if not recipe.data.packing:
            return causal_lm.document_rows(recipe, stream, text_tokenizer.eos_token_id)
        return PackedRows(stream, recipe.batch.sequence_length, text_tokenizer.eos_token_id)

    return causal_lm.load(recipe, text_tokenizer, token_store.DocumentEncoder(text_tokenizer), find, make_rows)
