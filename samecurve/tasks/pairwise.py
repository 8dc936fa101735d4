"""Base of the tasks that train on preference pairs: data loading, counts and metrics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from samecurve.data import sources, token_store, tokenizer
from samecurve.data.datasets.preference import JudgedRows, PairRows
from samecurve.data.find import find_pairs
from samecurve.data.schemas import preference
from samecurve.tasks import splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult, StepResult

PairsType = TypeVar("PairsType", bound=PairRows | JudgedRows, covariant=True)


@dataclass
class PairTask(splits.LoadedTask[PairsType], Generic[PairsType]):
    """Task whose rows are pairs of a chosen and a rejected answer to one prompt."""

    counts = "pairs"
    num_step_statistics = 3

    @abstractmethod
    def counted(self, labels: Tensor) -> Tensor:
        """Return a mask (pairs,) bool: False for pairs that only pad the micro-batch."""

    def count(self, labels: Tensor, **_: Tensor) -> int:
        return int(self.counted(labels).sum())

    @abstractmethod
    def statistics(self, logits: Tensor, labels: Tensor, **targets: Tensor) -> Tensor:
        """Return `reward_sums` of the model's rewards, (3,)."""

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return the loss and the reward metrics of the validation pairs.

        Returns:
            eval_loss: nats per pair.
            eval_accuracy: fraction of pairs whose chosen answer has the higher reward.
            eval_rewards_chosen, eval_rewards_rejected, eval_margin: mean rewards, and their mean difference.
            eval_pairs: number of pairs.
        """
        result.check(len(self.eval_rows), self.counts)
        means = {f"eval_{name}": value for name, value in self.means(result.statistics, result.tokens).items()}
        return {"eval_loss": result.loss, **means, f"eval_{self.counts}": result.tokens}

    def step_metrics(self, result: StepResult) -> dict[str, float | None]:
        """Return the same reward metrics for the step's pairs, under the weights before the step's update."""
        sums = result.statistics or [math.nan] * self.num_step_statistics  # () if nothing was trained
        return {**self.means(sums, max(result.tokens, 1))}

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "sequences_per_row": 2}

    def means(self, statistics: Sequence[float], num_pairs: int) -> dict[str, float]:
        """Return the reward metrics of these `statistics`."""
        chosen, rejected, right = (total / num_pairs for total in statistics)
        return reward_metrics(chosen, rejected, right)


def reward_metrics(chosen: float, rejected: float, right: float) -> dict[str, float]:
    return {"rewards_chosen": chosen, "rewards_rejected": rejected, "margin": chosen - rejected, "accuracy": right}


def reward_sums(rewards: Tensor, counted: Tensor) -> Tensor:
    """Sum the chosen and the rejected rewards, (pairs, 2), and count the pairs with chosen above rejected.

    Returns:
        (3,) fp64, over the pairs in `counted`.
    """
    # by a fill, because to select rows by a mask waits for the device
    rewards = rewards.double().masked_fill(~counted[:, None], 0.0)
    return torch.cat([rewards.sum(dim=0), (rewards[:, 0] > rewards[:, 1]).sum().reshape(1)])


def load_pairs(
    recipe: Recipe,
    kind: type[PairsType],
    padding: Literal["eos", "pad"],
    source: type[preference.PairSource] = preference.PairSource,
    encoder: type[preference.PairEncoder] = preference.PairEncoder,
) -> tuple[PreTrainedTokenizerFast, splits.Splits[PairsType]]:
    """Load the tokenizer and the rows, of a class, of a task on preferences.

    Args:
        padding: token of the padding.
        source: how rows of tables are read.
        encoder: how they become tokens.

    Raises:
        DataError: for a tokenizer without a chat template, or without a padding token if it pads; see also
            `splits.load_splits`.
    """
    schema = preference.PairSchema.of(recipe.data)

    def find_source(data: Data) -> sources.DataSource:
        return find_pairs(splits.path_of(data), data.pattern, schema, sources.Selection.of(recipe, data), source)

    chat_tokenizer = tokenizer.load_tokenizer(recipe, find_source)
    if padding == "pad":
        tokenizer.padding(chat_tokenizer)

    def make_rows(stream: token_store.TokenStream) -> PairsType:
        token = splits.token_id(chat_tokenizer, padding)
        return splits.padded_rows(recipe, kind, stream, token, recipe.data.truncation)

    encodes = encoder(chat_tokenizer, schema, recipe.data.train_on, recipe.tokenizer.template_date)
    return chat_tokenizer, splits.load_splits(recipe, encodes, find_source, make_rows)
