"""Preference optimisation without a reward model: makes the chosen answer to a prompt likelier than the rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samecurve.data.datasets.preference import AnswerRows
from samecurve.interfaces.engine import EvalResult
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.preference import kto_drift, pair_losses, rewards, sequence_log_probabilities
from samecurve.models.hf_config import Head
from samecurve.tasks import pairwise
from samecurve.tasks import reference_logprobs as references

if TYPE_CHECKING:
    from samecurve.config.schema import Dpo, Recipe
    from samecurve.interfaces.task import InitialState

SumParts = Callable[[Tensor], Tensor]  # see Task


@dataclass
class DpoTask(pairwise.PairTask[AnswerRows]):
    """Preference optimisation with one of the pairwise losses of `dpo.loss`.

    Losses that need a reference model take the target `reference`, (pairs, 2): the log-probability of each answer under
    the model that the run started with. `reference_logprobs.provide_reference` adds it to the rows' targets.

    With data.train_on=completion the tokens are those of TRL's DPOTrainer, with two differences. Pairs whose answers
    are equal after truncation are left out (TRL counts them, with a gradient of 0). No end-of-text token is added to
    the rendered template (TRL's ORPO and CPO add one if it is missing).
    """

    settings: Dpo
    head = Head()
    by_log_probability = True

    @property
    def has_reference(self) -> bool:
        return self.settings.has_reference

    def prepare(self, start: InitialState) -> None:
        if not self.has_reference:
            return
        model = references.model_key(start.recipe, start.skeleton, self)
        if not start.validation_only:
            references.provide_reference(self.train, "training", start, model)
        if self.validation is not None:
            references.provide_reference(self.validation, "validation", start, model)

    def loss(self, logits: Tensor, labels: Tensor, **targets: Any) -> Tensor:
        return self.step_loss(logits, labels, **targets)[0]

    def step_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        reference: Tensor | None = None,
        drift: Tensor | None = None,
        sum_parts: SumParts | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Loss and rewards share one pass over the logits: a second one would need their memory again.
        log_probabilities, lengths = _of_answers(logits, labels, sum_parts)
        counted = (lengths > 0).all(dim=-1)
        losses = pair_losses(self.settings, log_probabilities, lengths, reference, drift)
        of_answers = rewards(self.settings, log_probabilities.detach(), lengths, reference)
        return losses.masked_fill(~counted, 0.0).sum(), pairwise.reward_sums(of_answers, counted)

    def statistics(self, logits: Tensor, labels: Tensor, **targets: Any) -> Tensor:
        return self.step_loss(logits, labels, **targets)[1]

    def features(
        self, logits: Tensor, labels: Tensor, reference: Tensor | None = None, sum_parts: SumParts | None = None
    ) -> Tensor:
        """Return (pairs, 2): log-probabilities of both answers, minus those of the reference model if given."""
        log_probabilities, _ = _of_answers(logits, labels, sum_parts)
        return log_probabilities if reference is None else log_probabilities - reference

    def counted(self, labels: Tensor) -> Tensor:
        return (labels != IGNORE_INDEX).any(dim=-1).view(-1, 2).all(dim=-1)


class KtoTask(DpoTask):
    """KTO on pairs, whose loss depends on other rows of the global batch (in an evaluation, on all pairs).

    The log-ratio of a chosen answer is compared with the mean over the rejected answers and vice versa, see kto_drift.
    """

    def context(self, features: Tensor) -> dict[str, Tensor]:
        return {"drift": kto_drift(features)}

    def metrics(self, result: EvalResult) -> dict[str, float]:
        assert result.features is not None  # as the task has a `context`
        # Padding rows come last. The features have the reference subtracted already, and kto's loss reads no lengths.
        ratios = result.features[: len(self.eval_rows)]
        losses = pair_losses(self.settings, ratios, torch.ones(()), torch.zeros(()), kto_drift(ratios))
        everyone = torch.ones(len(ratios), dtype=torch.bool)
        statistics = tuple(pairwise.reward_sums(self.settings.beta * ratios, everyone).tolist())
        return super().metrics(EvalResult(losses.mean().item(), result.tokens, statistics))


def load_task(recipe: Recipe) -> DpoTask:
    """Load the task. Raises as `pairwise.load_pairs` does."""
    make = KtoTask if recipe.dpo.loss == "kto" else DpoTask
    return make(*pairwise.load_pairs(recipe, AnswerRows, "eos"), recipe.dpo)


def _of_answers(logits: Tensor, labels: Tensor, sum_parts: SumParts | None) -> tuple[Tensor, Tensor]:
    """Return the answers' log-probabilities and their numbers of trained tokens, both (pairs, 2), fp32."""
    sums = torch.stack([sequence_log_probabilities(logits, labels), (labels != IGNORE_INDEX).sum(dim=-1)])
    sums = sum_parts(sums) if sum_parts else sums
    return sums[0].view(-1, 2), sums[1].view(-1, 2)
