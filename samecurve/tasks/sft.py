"""Supervised fine-tuning on the assistant's turns of conversations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from samecurve.data import chat_encoder, sources
from samecurve.data.datasets.packed_samples import PackedSampleRows
from samecurve.data.find import find_conversations
from samecurve.data.schemas import conversation
from samecurve.tasks import causal_lm, splits

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe


def load_task(recipe: Recipe) -> causal_lm.CausalTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a chat template; see also `causal_lm.load_causal_task`.
    """
    schema = conversation.ChatSchema.of(recipe.data)

    def find_source(data: Data) -> sources.DataSource:
        # each source of a mixture has columns of its own
        own_schema = conversation.ChatSchema.of(data)
        return find_conversations(splits.path_of(data), data.pattern, own_schema, sources.Selection.of(recipe, data))

    chat_tokenizer = causal_lm.load_tokenizer(recipe, find_source)
    packed = partial(PackedSampleRows, truncation=recipe.data.truncation)
    encoder = chat_encoder.encoder(chat_tokenizer, schema, recipe.tokenizer.template_date)
    task = causal_lm.load_causal_task(recipe, chat_tokenizer, encoder, find_source, packed)
    task.details = {"train_on": recipe.data.train_on, **task.details}
    return task
