"""Classification of the words of a text, such as names and parts of speech."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data import sources, tokenizer
from samecurve.data.datasets.text import TaggedRows
from samecurve.data.find import find_labelled_words
from samecurve.data.schemas import classification
from samecurve.data.schemas.token_labels import STEP_NAMES, WordEncoder
from samecurve.specs.heads import Head
from samecurve.storage.cache import cache_folder
from samecurve.tasks import splits
from samecurve.tasks.classify import ClassTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe


@dataclass
class TokenTask(ClassTask[TaggedRows]):
    """Cross-entropy of the classes of labelled tokens, the mean over them, as in transformers.

    Accuracy and F1 are those of labelled tokens, one for each word.
    """

    counts = "tokens"

    @property
    def head(self) -> Head:
        return Head("token_classification", self.class_fields)

    def describe(self) -> dict[str, object]:
        tags = self.train.stream.tags
        assert tags is not None  # WordEncoder is tagged
        counts = np.bincount(tags[tags >= 0], minlength=len(self.names)).tolist()
        return {**super().describe(), "classes": dict(zip(self.names, counts, strict=True))}


def load_task(recipe: Recipe) -> TokenTask:
    """Load the task. Raises as `classify.load_task` does."""
    data, cache = recipe.data, cache_folder(recipe.data.cache_dir)
    unnamed = find_labelled_words(data, data.labels, sources.Selection.of(recipe, data))
    names = unnamed.names or classification.class_names(unnamed, cache)
    return load_labelled_words(recipe, names, partial(WordEncoder, names=names))


def load_labelled_words(recipe: Recipe, names: tuple[str, ...], make_encoder: Callable[..., WordEncoder]) -> TokenTask:
    """Load the task of some class names. Rows are steps if the names are STEP_NAMES."""

    def find_source(chosen: Data) -> sources.DataSource:
        return find_labelled_words(chosen, names, sources.Selection.of(recipe, chosen), names is STEP_NAMES)

    text_tokenizer: PreTrainedTokenizerFast = tokenizer.padding(tokenizer.load_tokenizer(recipe, find_source))
    encoder = make_encoder(text_tokenizer, recipe.batch.sequence_length, truncation=recipe.data.truncation)
    padding = splits.token_id(text_tokenizer, "pad")
    loaded = splits.load_splits(
        recipe,
        encoder,
        find_source,
        lambda stream: splits.padded_rows(recipe, TaggedRows, stream, padding),
    )
    return TokenTask(text_tokenizer, loaded, names)
