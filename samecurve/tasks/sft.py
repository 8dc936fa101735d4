"""Supervised fine-tuning on the assistant's turns of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.data import chat_encoder, sources, token_store
from samecurve.data.datasets.base import PackedSampleRows, SampleRows
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.tasks import causal_lm

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe


def load(recipe: Recipe) -> causal_lm.CausalTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a chat template; see also `causal_lm.load`.
    """
    schema = conversation.ChatSchema.of(recipe.data)

    def find(data: Data) -> sources.DataSource:
        own_schema = conversation.ChatSchema.of(data)
        return find_conversations(data.path, data.pattern, own_schema, sources.Selection.of(recipe, data))

    chat_tokenizer = causal_lm.load_tokenizer(recipe, find)

    def make_rows(stream: token_store.TokenStream) -> SampleRows:
        if not recipe.data.packing:
            return causal_lm.document_rows(recipe, stream, chat_tokenizer.eos_token_id)
        return PackedSampleRows(stream, recipe.batch.sequence_length, chat_tokenizer.eos_token_id)

    task = causal_lm.load(recipe, chat_tokenizer, chat_encoder.encoder(chat_tokenizer, schema), find, make_rows)
    task.details = {"train_on": recipe.data.train_on, **task.details}
    return task
