"""Sequence classification of single texts or pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.text import LabelledRows
from samecurve.data.find import find_examples
from samecurve.data.schemas import classification
from samecurve.errors import DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX, count_trained
from samecurve.specs.heads import Head
from samecurve.storage.cache import cache_folder
from samecurve.tasks import splits
from samecurve.tasks.splits import RowsType

if TYPE_CHECKING:
    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult
    from samecurve.specs.data_names import ProblemType


@dataclass
class ClassTask(splits.LoadedTask[RowsType], Generic[RowsType]):
    """Base of tasks with one class per row or token, and a cross-entropy loss.

    Attributes:
        names: class names. A class's id is its index in this tuple.
    """

    names: tuple[str, ...]

    @property
    def class_fields(self) -> dict[str, Any]:
        """Config fields with the class names."""
        return {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
            "pad_token_id": self.tokenizer.pad_token_id,
        }

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the confusion matrix, flattened to (classes * classes,); the true class is the slow index."""
        counted, size = labels != IGNORE_INDEX, len(self.names)
        return torch.bincount((labels * size + logits.argmax(dim=-1))[counted], minlength=size * size)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per row or token, eval_accuracy, eval_f1 (macro F1) and the number of them.

        As in scikit-learn, macro F1 leaves out a class that is neither the label nor the prediction of any row.
        """
        confusion = np.array(result.statistics).reshape(len(self.names), -1)
        if not result.tokens == confusion.sum() == self.eval_rows.num_targets:
            raise DataError(
                f"{result.tokens} validation {self.counts} were evaluated and {confusion.sum():.0f} classified, but "
                f"the data have {self.eval_rows.num_targets}"
            )
        right = confusion.diagonal()
        relevant = confusion.sum(axis=0) + confusion.sum(axis=1)
        return {
            "eval_loss": result.loss,
            "eval_accuracy": float(right.sum() / confusion.sum()),
            "eval_f1": float((2 * right[relevant > 0] / relevant[relevant > 0]).mean()),
            f"eval_{self.counts}": result.tokens,
        }


@dataclass
class ClassifyTask(ClassTask[LabelledRows]):
    """Single-label classification; ScoresTask has the other problems."""

    counts = "rows"

    @property
    def head(self) -> Head:
        """Sequence classification head with the class names. A decoder classifies from the last token but padding."""
        return Head("sequence_classification", {**self.class_fields, "problem_type": "single_label_classification"})

    def describe(self) -> dict[str, object]:
        labels = self.train.stream.labels
        assert labels is not None  # ExampleEncoder is labelled
        counts = np.bincount(labels, minlength=len(self.names)).tolist()
        return {**super().describe(), "classes": dict(zip(self.names, counts, strict=True))}

    def label_of(self, rows: LabelledRows, index: int) -> str:
        """Return a row's label as text."""
        return self.names[rows[np.array([index])].labels[0]]


@dataclass
class ScoresTask(ClassifyTask):
    """Regression, several classes at once, and relevance, which is one class with labels between 0 and 1.

    The losses are those of transformers: the mean over the outputs of squares or of binary cross-entropies.
    """

    problem_type: ProblemType

    @property
    def head(self) -> Head:
        fields = dict(super().head.fields)
        if self.problem_type != "multi_label":
            fields = {"num_labels": 1, "pad_token_id": fields["pad_token_id"]}
        # transformers' pipeline shows sigmoids for the second one, whatever the number of outputs
        name = "regression" if self.problem_type == "regression" else "multi_label_classification"
        return Head("sequence_classification", fields | {"problem_type": name})

    def loss(self, logits: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
        logits, scores = logits.float(), scores.view_as(logits)
        if self.problem_type == "regression":
            losses = (logits - scores).square()
        else:
            losses = F.binary_cross_entropy_with_logits(logits, scores, reduction="none")
        return losses.mean(dim=-1).masked_fill(labels == IGNORE_INDEX, 0.0).sum()

    def count(self, labels: Tensor, scores: Tensor) -> int:
        return count_trained(labels)

    def statistics(self, logits: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
        """Return the sums of which `metrics` makes its values.

        Regression: of predictions, labels, their squares, their products and distances, (6,). Otherwise, (3k + 1,):
        the rows of each of k classes that are rightly predicted, predicted and labelled, and the rows without an error.
        """
        logits, scores = logits.double(), scores.view_as(logits).double()
        counted = (labels != IGNORE_INDEX)[:, None]
        if self.problem_type == "regression":
            sums = [logits, scores, logits.square(), scores.square(), logits * scores, (logits - scores).abs()]
            return torch.cat(sums, dim=1).masked_fill(~counted, 0.0).sum(dim=0)
        predicted, labelled = logits > 0, scores >= 0.5
        right = (predicted == labelled).all(dim=1, keepdim=True)
        return (torch.cat([predicted & labelled, predicted, labelled, right], dim=1) & counted).sum(dim=0)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss, eval_rows, and of regression eval_mae (mean distance) and eval_pearson (correlation).

        Otherwise eval_accuracy, the fraction of rows without an error, as scikit-learn's accuracy_score, and eval_f1,
        the mean over the classes that are the label or prediction of a row. A class is predicted above 0.5.
        """
        num_rows, sums = len(self.eval_rows), np.array(result.statistics)
        result.check(num_rows, "rows")
        metrics = {"eval_loss": result.loss, "eval_rows": num_rows}
        if self.problem_type == "regression":
            x, y, xx, yy, xy, distance = sums / num_rows
            spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
            pearson = float((xy - x * y) / spread**0.5) if spread > 0 else 0.0
            return {**metrics, "eval_mae": float(distance), "eval_pearson": pearson}
        right, predicted, labelled = sums[:-1].reshape(3, -1)
        relevant = predicted + labelled > 0
        f1 = 2 * right[relevant] / (predicted + labelled)[relevant]
        return {**metrics, "eval_accuracy": sums[-1] / num_rows, "eval_f1": float(f1.mean()) if len(f1) else 0.0}

    def describe(self) -> dict[str, object]:
        labels = self.train.stream.labels
        assert labels is not None  # ExampleEncoder is labelled
        facts = splits.LoadedTask.describe(self)
        if self.problem_type == "multi_label":
            return {**facts, "classes": dict(zip(self.names, labels.sum(axis=0).astype(int).tolist(), strict=True))}
        return {**facts, "labels": {"least": labels.min(), "mean": labels.mean(), "most": labels.max()}}

    def label_of(self, rows: LabelledRows, index: int) -> str:
        scores = rows[np.array([index])].targets["scores"].ravel()
        if self.problem_type != "multi_label":
            return f"{scores[0]:g}"
        return ", ".join(name for name, score in zip(self.names, scores, strict=True) if score) or "none"


def load_task(recipe: Recipe) -> ClassifyTask:
    """Load the task.

    Raises:
        DataError: for a tokenizer without a padding token; see also `splits.load_splits` and
            `classification.class_names`.
    """
    data, cache, problem_type = recipe.data, cache_folder(recipe.data.cache_dir), recipe.classify.problem_type
    # the training data alone name the classes, also if the evaluation has its own data
    unnamed = find_examples(data, data.labels, sources.Selection.of(recipe, data), problem_type)
    if problem_type in ("regression", "relevance"):
        names: tuple[str, ...] = ("LABEL_0",)  # transformers' name for a single output
    else:
        names = unnamed.names or classification.class_names(unnamed, cache)

    def find_source(chosen: Data) -> sources.DataSource:
        return find_examples(chosen, names, sources.Selection.of(recipe, chosen), problem_type)

    text_tokenizer = tokenizer.padding(tokenizer.load_tokenizer(recipe, find_source))
    length, pairs = recipe.batch.sequence_length, data.text_pair_column is not None
    encoder = classification.ExampleEncoder(text_tokenizer, length, names, pairs, data.truncation)

    def make_rows(stream: token_store.TokenStream) -> LabelledRows:
        return splits.padded_rows(recipe, LabelledRows, stream, splits.token_id(text_tokenizer, "pad"))

    loaded = splits.load_splits(recipe, encoder, find_source, make_rows)
    if problem_type == "single_label":
        return ClassifyTask(text_tokenizer, loaded, names)
    return ScoresTask(text_tokenizer, loaded, names, problem_type)
