"""What tasks share that train on preference pairs: the data, the counts, the metrics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.preference import PairRows
from samecurve.data.find import find_pairs
from samecurve.data.schemas import preference
from samecurve.errors import DataError
from samecurve.tasks import splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult, StepResult


@dataclass
class PairTask(splits.TextTask):
    counts = "pairs"
    num_step_statistics = 3

    @abstractmethod
    def rewards(self, logits: Tensor, labels: Tensor, **targets: Tensor) -> Tensor:
        """(pairs, 2): how good the model finds each answer, the chosen one first."""

    @abstractmethod
    def counted(self, labels: Tensor) -> Tensor:
        """(pairs,) bool: which pairs do not only fill up."""

    def count(self, labels: Tensor, **_: Tensor) -> int:
        return int(self.counted(labels).sum())

    def statistics(self, logits: Tensor, labels: Tensor, **targets: Tensor) -> Tensor:
        """(3,): the sum of the chosen answers' rewards, of the rejected ones', and how many pairs are the right way."""
        return summed(self.rewards(logits, labels, **targets)[self.counted(labels)])

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """eval_loss in nats per pair; eval_accuracy: the part of the pairs whose chosen answer has the higher reward;
        eval_margin: by how much on average."""
        if result.tokens != len(self.held_out):
            raise DataError(f"{result.tokens} held-out pairs were evaluated, but the data hold {len(self.held_out)}")
        found = {f"eval_{name}": value for name, value in _means(result.statistics, result.tokens).items()}
        return {"eval_loss": result.loss, **found, "eval_pairs": result.tokens}

    def step_metrics(self, result: StepResult) -> dict[str, float | None]:
        """The same numbers of the step's pairs, by the model that the step began with."""
        return _means(result.statistics or [math.nan] * self.num_step_statistics, max(result.tokens, 1))

    def describe(self) -> dict[str, object]:
        counted = {"vocabulary_size": self.vocabulary_size, "empty_documents": self.parts.empty_documents}
        return {**self.parts.describe(), "sequences_per_row": 2, **counted, **self.parts.counts}


def _means(statistics: Sequence[float], num_pairs: int) -> dict[str, float]:
    chosen, rejected, right = (total / num_pairs for total in statistics)
    return {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": right,
    }


def summed(rewards: Tensor) -> Tensor:
    """(3,) fp64 of (pairs, 2), see PairTask.statistics."""
    return torch.cat([rewards.double().sum(dim=0), (rewards[:, 0] > rewards[:, 1]).sum().reshape(1)])


def load(
    recipe: Recipe,
    make_rows: Callable[[Recipe, token_store.TokenStream, PreTrainedTokenizerFast], PairRows],
    pads: bool = False,
) -> tuple[PreTrainedTokenizerFast, splits.Parts]:
    """pads: whether the task needs a token that pads. Errors: see parts.load; DataError also for a tokenizer without
    that, and without a chat template."""
    schema = preference.Schema.of(recipe.data)

    def find(data: Data) -> sources.DataSource:
        return find_pairs(data.path, data.pattern, schema, sources.Selection.of(recipe, data))

    found = tokenizer.load_tokenizer(recipe, find)
    if pads:
        tokenizer.padding(found)
    encoder = preference.PairEncoder(found, schema, recipe.data.train_on)
    return found, splits.load(recipe, encoder, find, lambda stream: make_rows(recipe, stream, found))
