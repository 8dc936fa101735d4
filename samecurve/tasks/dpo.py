"""Preference optimisation without a reward model: the better answer to a prompt is made more likely than the worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.data.datasets.preference import AnswerRows, GroupedAnswerRows
from samecurve.interfaces.engine import EvalResult
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.losses.preference import kto_drift, pair_losses, rewards, sequence_log_probabilities
from samecurve.models.hf_config import Head
from samecurve.tasks import pairwise, splits
from samecurve.tasks import reference_logprobs as references

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from samecurve.config.schema import Dpo, Recipe
    from samecurve.data.token_store import TokenStream
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine


@dataclass
class DpoTask(pairwise.PairTask):
    """reference: (pairs, 2), log-probabilities of both answers under the model that the run began with; among the
    rows' targets once `reference.provide` has found them, where the loss asks for them.

    The tokens are those of TRL's DPOTrainer by data.train_on=completion, with two differences: pairs that are equal
    after the cut are left out (TRL counts them, with a gradient of 0), and no end-of-text token is added to what the
    template wrote (TRL's ORPO and CPO add one where there is none).
    """

    settings: Dpo
    head = Head()

    @property
    def has_reference(self) -> bool:
        return self.settings.has_reference

    def prepare(
        self,
        engine: Engine,
        recipe: Recipe,
        skeleton: PreTrainedModel,
        world: ControlGroup,
        alive: Callable[[], None],
        held_out_only: bool = False,
    ) -> None:
        if not self.has_reference:
            return
        key = references.model_key(recipe, skeleton, self)
        for title, rows in (("training", self.train), ("held-out", self.held_out)):
            if rows is not None and not (held_out_only and title == "training"):
                references.provide(rows, title, engine, recipe, key, world, alive)

    def loss(
        self, logits: Tensor, labels: Tensor, reference: Tensor | None = None, drift: Tensor | None = None
    ) -> Tensor:
        return self.step_loss(logits, labels, reference, drift)[0]

    def step_loss(
        self, logits: Tensor, labels: Tensor, reference: Tensor | None = None, drift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rewards come with the loss: another look at the logits would take their memory again."""
        found, lengths = _measured(logits, labels)
        counted = self.counted(labels)
        losses = pair_losses(self.settings, found, lengths, reference, drift)
        given = rewards(self.settings, found.detach(), lengths, reference)
        return losses.masked_fill(~counted, 0.0).sum(), pairwise.summed(given[counted])

    def rewards(
        self, logits: Tensor, labels: Tensor, reference: Tensor | None = None, drift: Tensor | None = None
    ) -> Tensor:
        return rewards(self.settings, *_measured(logits, labels), reference)

    def features(self, logits: Tensor, labels: Tensor, reference: Tensor | None = None) -> Tensor:
        """(pairs, 2): log-probabilities of both answers, less the reference's where those are known."""
        found, _ = _measured(logits, labels)
        return found if reference is None else found - reference

    def counted(self, labels: Tensor) -> Tensor:
        return (labels != IGNORE_INDEX).any(dim=-1).view(-1, 2).all(dim=-1)


class KtoTask(DpoTask):
    """Its pairs meet: each is compared with the mean of the whole global batch, and in an evaluation of all pairs."""

    def context(self, features: Tensor) -> dict[str, Tensor]:
        return {"drift": kto_drift(features)}

    def metrics(self, result: EvalResult) -> dict[str, float]:
        ratios = result.features[: len(self.held_out)]
        losses = pair_losses(self.settings, ratios, torch.ones(()), torch.zeros(()), kto_drift(ratios))
        statistics = tuple(pairwise.summed(self.settings.beta * ratios).tolist())
        return super().metrics(EvalResult(losses.mean().item(), result.tokens, statistics))


def load(recipe: Recipe) -> DpoTask:
    """Errors: see pairs.load."""
    make = KtoTask if recipe.dpo.loss == "kto" else DpoTask
    return make(*pairwise.load(recipe, _rows), recipe.dpo)


def _rows(recipe: Recipe, stream: TokenStream, tokenizer: PreTrainedTokenizerFast) -> AnswerRows:
    return splits.padded(recipe, (AnswerRows, GroupedAnswerRows), stream, tokenizer.eos_token_id)


def _measured(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(pairs, 2) log-probabilities of the answers, and (pairs, 2) how many tokens they have."""
    lengths = (labels != IGNORE_INDEX).sum(dim=-1)
    return sequence_log_probabilities(logits, labels).view(-1, 2), lengths.view(-1, 2)
