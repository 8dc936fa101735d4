"""Next-token prediction on plain documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import corpus, sources
from ..rows import DocumentRows, PackedRows
from . import causal

if TYPE_CHECKING:
    from ..config import Data, Recipe


def load(recipe: Recipe) -> causal.CausalTask:
    """Errors: see causal.load."""

    def find(data: Data) -> sources.Source:
        return sources.find(data.path, data.pattern, data.text_column)

    text_tokenizer = causal.load_tokenizer(recipe, find)

    def make_rows(stream: corpus.TokenStream) -> PackedRows | DocumentRows:
        if not recipe.data.packing:
            return causal.document_rows(recipe, stream, text_tokenizer.eos_token_id)
        return PackedRows(stream, recipe.batch.sequence_length, text_tokenizer.eos_token_id)

    return causal.load(recipe, text_tokenizer, corpus.DocumentEncoder(text_tokenizer), find, make_rows)
