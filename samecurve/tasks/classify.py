"""Sequence classification of single texts or pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.text import LabelledRows
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
class ClassifyTask(splits.LoadedTask[LabelledRows]):
    """Single-label classification with a cross-entropy loss.

    Attributes:
        names: class names. A class's id is its index in this tuple.
    """

    names: tuple[str, ...]
    counts = "rows"

    @property
    def head(self) -> Head:
        """Sequence classification head with the class names."""
        fields = {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
            "problem_type": "single_label_classification",
            # A decoder classifies from the last token that is not padding.
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        return Head("sequence_classification", fields)

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the confusion matrix, flattened to (classes * classes,); the true class is the slow index."""
        counted, size = labels != IGNORE_INDEX, len(self.names)
        return torch.bincount((labels * size + logits.argmax(dim=-1))[counted], minlength=size * size)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per row, eval_accuracy, eval_f1 (macro F1) and eval_rows.

        As in scikit-learn, macro F1 leaves out a class that is neither the label nor the prediction of any row.
        """
        confusion = np.array(result.statistics).reshape(len(self.names), -1)
        if not result.tokens == confusion.sum() == len(self.eval_rows):
            raise DataError(
                f"{result.tokens} validation rows were evaluated and {confusion.sum():.0f} classified, but the data "
                f"have {len(self.eval_rows)}"
            )
        right = confusion.diagonal()
        relevant = confusion.sum(axis=0) + confusion.sum(axis=1)
        return {
            "eval_loss": result.loss,
            "eval_accuracy": float(right.sum() / confusion.sum()),
            "eval_f1": float((2 * right[relevant > 0] / relevant[relevant > 0]).mean()),
            "eval_rows": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        labels = self.train.stream.labels
        assert labels is not None  # ExampleEncoder is labelled
        counts = np.bincount(labels, minlength=len(self.names)).tolist()
        return {**super().describe(), "classes": dict(zip(self.names, counts, strict=True))}


def load_task(recipe: Recipe) -> ClassifyTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a padding token; see also `splits.load_splits` and
            `classification.class_names`.
    """
    data, cache = recipe.data, cache_folder(recipe.data.cache_dir)
    # the training data alone name the classes, also if the evaluation has its own data
    unnamed = find_examples(data, data.labels, sources.Selection.of(recipe, data))
    names = unnamed.names or classification.class_names(unnamed, cache)

    def find_source(chosen: Data) -> sources.DataSource:
        return find_examples(chosen, names, sources.Selection.of(recipe, chosen))

    text_tokenizer = tokenizer.padding(tokenizer.load_tokenizer(recipe, find_source))
    length, pairs = recipe.batch.sequence_length, data.text_pair_column is not None
    encoder = classification.ExampleEncoder(text_tokenizer, length, names, pairs, data.truncation)

    def make_rows(stream: token_store.TokenStream) -> LabelledRows:
        return splits.padded_rows(recipe, LabelledRows, stream, splits.token_id(text_tokenizer, "pad"))

    return ClassifyTask(text_tokenizer, splits.load_splits(recipe, encoder, find_source, make_rows), names)
