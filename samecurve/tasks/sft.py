"""Supervised fine-tuning: the answers of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import chat, conversations, corpus, sources
from ..rows import PackedSampleRows, SampleRows
from . import causal

if TYPE_CHECKING:
    from ..config import Data, Recipe


def load(recipe: Recipe) -> causal.CausalTask:
    """Errors: see causal.load; DataError also for a tokenizer without a chat template."""
    schema = conversations.Schema.of(recipe.data)

    def find(data: Data) -> sources.Source:
        return conversations.find(data.path, data.pattern, conversations.Schema.of(data))

    chat_tokenizer = causal.load_tokenizer(recipe, find)

    def make_rows(stream: corpus.TokenStream) -> SampleRows:
        if not recipe.data.packing:
            return causal.document_rows(recipe, stream, chat_tokenizer.eos_token_id)
        return PackedSampleRows(stream, recipe.batch.sequence_length, chat_tokenizer.eos_token_id)

    task = causal.load(recipe, chat_tokenizer, chat.encoder(chat_tokenizer, schema), find, make_rows)
    task.details = {"train_on": recipe.data.train_on, **task.details}
    return task
