"""Sequence classification: which of some classes a text, or a pair of texts, belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.text import GroupedLabelledRows, LabelledRows
from samecurve.data.find import find_examples
from samecurve.data.schemas import classification
from samecurve.errors import DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models.hf_config import Head
from samecurve.storage.cache import cache_folder
from samecurve.tasks import splits

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class ClassifyTask(splits.TextTask):
    """names: of the classes; a class is its place there."""

    names: tuple[str, ...]
    counts = "rows"

    @property
    def head(self) -> Head:
        """A decoder reads the class off its last token that is not padding, which it finds by pad_token_id."""
        fields = {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
            "problem_type": "single_label_classification",
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        return Head("sequence_classification", fields)

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(classes x classes,): how many rows of each class (slow index) were taken for each class."""
        counted, size = labels != IGNORE_INDEX, len(self.names)
        return torch.bincount((labels * size + logits.argmax(dim=-1))[counted], minlength=size * size)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """eval_loss in nats per row; eval_accuracy; eval_f1: the mean over classes of each one's F1.

        A class that no row has and no row was taken for is left out of that mean, as in scikit-learn.
        """
        confusion = np.array(result.statistics).reshape(len(self.names), -1)
        if not result.tokens == confusion.sum() == len(self.held_out):
            found = f"{result.tokens} held-out rows were evaluated and {confusion.sum():.0f} classified"
            raise DataError(f"{found}, but the data hold {len(self.held_out)}")
        right = confusion.diagonal()
        relevant = confusion.sum(axis=0) + confusion.sum(axis=1)
        return {
            "eval_loss": result.loss,
            "eval_accuracy": float(right.sum() / confusion.sum()),
            "eval_f1": float((2 * right[relevant > 0] / relevant[relevant > 0]).mean()),
            "eval_rows": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        found: dict[str, object] = self.parts.describe()
        counts = np.bincount(self.train.stream.labels, minlength=len(self.names)).tolist()
        found["classes"] = dict(zip(self.names, counts, strict=True))
        return found | {"vocabulary_size": self.vocabulary_size, **self.parts.counts}


def load(recipe: Recipe) -> ClassifyTask:
    """Errors: see parts.load and examples.class_names; DataError for a tokenizer without a token that pads."""
    data, cache = recipe.data, cache_folder(recipe.data.cache_dir)
    unnamed = find_examples(data, data.labels, sources.Selection.of(recipe, data))
    names = unnamed.names or classification.class_names(unnamed, cache)

    def find(chosen: Data) -> sources.DataSource:
        return find_examples(chosen, names, sources.Selection.of(recipe, chosen))

    text_tokenizer = tokenizer.padding(tokenizer.load_tokenizer(recipe, find))
    length, pairs = recipe.batch.sequence_length, data.text_pair_column is not None
    encoder = classification.ExampleEncoder(text_tokenizer, length, names, pairs)

    def make_rows(stream: token_store.TokenStream) -> LabelledRows:
        return splits.padded(recipe, (LabelledRows, GroupedLabelledRows), stream, text_tokenizer.pad_token_id)

    return ClassifyTask(text_tokenizer, splits.load(recipe, encoder, find, make_rows), names)
