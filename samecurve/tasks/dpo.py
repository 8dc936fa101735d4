"""Preference optimisation without a reward model: makes the chosen answer to a prompt likelier than the rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from samecurve.data.datasets.preference import AnswerRows, JudgedRows
from samecurve.data.schemas.judged import JudgedEncoder, JudgedSource
from samecurve.interfaces.engine import EvalResult
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.preference import kto_drift, kto_losses, pair_losses, rewards, sequence_log_probabilities
from samecurve.specs.heads import Head
from samecurve.tasks import pairwise
from samecurve.tasks import reference_logprobs as references

if TYPE_CHECKING:
    from samecurve.config.schema import Dpo, Recipe
    from samecurve.interfaces.task import InitialState

SumParts = Callable[[Tensor], Tensor]  # see Task
AnswersType = TypeVar("AnswersType", bound=AnswerRows | JudgedRows, covariant=True)


@dataclass
class DpoTask(pairwise.PairTask[AnswersType]):
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
            references.provide_reference(self.train, f"training {self.counts}", start, model)
        if self.validation is not None:
            references.provide_reference(self.validation, f"validation {self.counts}", start, model)

    def loss(self, logits: Tensor, labels: Tensor, **targets: Any) -> Tensor:
        return self.step_loss(logits, labels, **targets)[0]

    def step_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        reference: Tensor | None = None,
        sum_parts: SumParts | None = None,
        **of_rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # Loss and rewards share one pass over the logits: a second one would need their memory again.
        return self._loss_and_statistics(*_of_answers(logits, labels, sum_parts), reference, **of_rows)

    def _loss_and_statistics(
        self, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        counted = (lengths > 0).all(dim=-1)
        losses = pair_losses(self.settings, log_probabilities, lengths, reference)
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


class KtoTask(DpoTask[JudgedRows]):
    """KTO: makes good answers likelier and bad ones less likely, without pairs; of a pair each answer is a row.

    An answer's log-ratio to the reference is compared with `drift`, which depends on all rows of the global batch (in
    an evaluation, on all rows): see JudgedRows and kto_drift.
    """

    counts = "answers"
    num_step_statistics = 4

    def _loss_and_statistics(
        self, log_probabilities: Tensor, lengths: Tensor, reference: Tensor | None, **of_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert reference is not None  # as kto has a reference
        return self._sums((log_probabilities - reference)[:, 0], (lengths > 0).all(dim=-1), **of_rows)

    def _sums(self, ratios: Tensor, counted: Tensor, drift: Tensor, is_good: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums of good and bad rewards, of good answers and of those on the right side."""
        losses, kept = kto_losses(self.settings, ratios, drift, is_good), ratios.detach()
        good, bad = counted & (is_good > 0), counted & (is_good == 0)
        rewards_of = (self.settings.beta * kept.double().masked_fill(~which, 0.0).sum() for which in (good, bad))
        right = counted & ((kept > drift) == (is_good > 0))
        statistics = torch.stack([*rewards_of, good.sum().double(), right.sum().double()])
        return losses.masked_fill(~counted, 0.0).sum(), statistics

    def features(self, logits: Tensor, labels: Tensor, is_good: Tensor | None = None, **targets: Any) -> Tensor:
        return super().features(logits, labels, **targets)

    def context(self, features: Tensor) -> dict[str, Tensor]:
        return {"drift": kto_drift(features[:, 1])}

    def means(self, statistics: Sequence[float], num_pairs: int) -> dict[str, float]:
        chosen, rejected, num_good, right = statistics
        counts = [count or math.nan for count in (num_good, num_pairs - num_good)]
        return pairwise.reward_metrics(chosen / counts[0], rejected / counts[1], right / num_pairs)

    def metrics(self, result: EvalResult) -> dict[str, float]:
        assert result.features is not None  # as the task has a `context`
        # Padding rows come last. The features have the reference subtracted already.
        features = result.features[: len(self.eval_rows)]
        is_good = torch.from_numpy(self.eval_rows.is_good).to(features.device)
        everyone = torch.ones_like(is_good)
        total, statistics = self._sums(features[:, 0], everyone, is_good=is_good, **self.context(features))
        mean = total.item() / len(features)
        return super().metrics(EvalResult(mean, result.tokens, tuple(statistics.tolist())))


def load_task(recipe: Recipe) -> DpoTask[Any]:
    """Load the task. Raises as `pairwise.load_pairs` does."""
    if recipe.dpo.loss == "kto":
        loaded = pairwise.load_pairs(recipe, JudgedRows, "eos", JudgedSource, JudgedEncoder)
        return KtoTask(*loaded, recipe.dpo)
    return DpoTask(*pairwise.load_pairs(recipe, AnswerRows, "eos"), recipe.dpo)


def _of_answers(logits: Tensor, labels: Tensor, sum_parts: SumParts | None) -> tuple[Tensor, Tensor]:
    """Return the answers' log-probabilities and their numbers of trained tokens, both (pairs, 2), fp32."""
    sums = torch.stack([sequence_log_probabilities(logits, labels), (labels != IGNORE_INDEX).sum(dim=-1)])
    sums = sum_parts(sums) if sum_parts else sums
    return sums[0].view(-1, 2), sums[1].view(-1, 2)
