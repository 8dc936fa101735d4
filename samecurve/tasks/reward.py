"""Reward modelling: a scalar score for a conversation, trained on preference pairs (Bradley-Terry)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from samecurve.data.datasets.preference import ScoredRows
from samecurve.data.schemas.preference import ScoredPairSource
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.heads import Head
from samecurve.tasks import pairwise

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe, Reward


@dataclass
class RewardTask(pairwise.PairTask[ScoredRows]):
    """Bradley-Terry loss on the scores of the chosen and the rejected answer."""

    settings: Reward

    @property
    def head(self) -> Head:
        # A decoder's score is that of its last token that is not padding.
        return Head("sequence_classification", {"num_labels": 1, "pad_token_id": self.tokenizer.pad_token_id})

    def describe(self) -> dict[str, object]:
        early = sum(rows.num_ended_by_padding for rows in (self.train, self.validation) if rows is not None)
        return {**super().describe(), "scores_read_before_the_last_token": early}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over pairs of -log sigmoid(chosen - rejected) (arXiv:2203.02155, equation 1, two answers).

        center_rewards_coefficient adds a penalty on the squared sum of the two rewards, which their difference leaves
        undetermined (arXiv:2312.09244, section 2).
        """
        rewards = self.rewards(logits, labels)
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
        if self.settings.center_rewards_coefficient is not None:
            losses = losses + self.settings.center_rewards_coefficient * rewards.sum(dim=1).square()
        return losses.masked_fill(~self.counted(labels), 0.0).sum()

    def step_loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(logits, labels), self.statistics(logits.detach(), labels)

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        return pairwise.reward_sums(self.rewards(logits, labels), self.counted(labels))

    def rewards(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.float().view(-1, 2)

    def counted(self, labels: Tensor) -> Tensor:
        return labels != IGNORE_INDEX


def load_task(recipe: Recipe) -> RewardTask:
    """Load the task. Raises as `pairwise.load_pairs` does."""
    return RewardTask(*pairwise.load_pairs(recipe, ScoredRows, "pad", ScoredPairSource), recipe.reward)
