"""Preference optimisation without a reward model: makes the chosen answer to a prompt likelier than the rejected."""

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
    """Preference optimisation with one of the pairwise losses of `dpo.loss`.

    Losses that need a reference model take the target `reference`, (pairs, 2): the log-probability of each answer under
    the model that the run started with. `reference_logprobs.provide` adds it to the rows' targets.

    With data.train_on=completion the tokens are those of TRL's DPOTrainer, with two differences. Pairs whose answers
    are equal after truncation are left out (TRL counts them, with a gradient of 0). No end-of-text token is added to
    the rendered template (TRL's ORPO and CPO add one if it is missing).
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
        # Loss and rewards share one pass over the logits: a second one would need their memory again.
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
        """Return (pairs, 2): log-probabilities of both answers, minus those of the reference model if given."""
        found, _ = _measured(logits, labels)
        return found if reference is None else found - reference

    def counted(self, labels: Tensor) -> Tensor:
        return (labels != IGNORE_INDEX).any(dim=-1).view(-1, 2).all(dim=-1)


class KtoTask(DpoTask):
    """KTO on pairs: each answer is compared with the mean over the global batch, in an evaluation over all pairs."""

    def context(self, features: Tensor) -> dict[str, Tensor]:
        return {"drift": kto_drift(features)}

    def metrics(self, result: EvalResult) -> dict[str, float]:
        ratios = result.features[: len(self.held_out)]
        losses = pair_losses(self.settings, ratios, torch.ones(()), torch.zeros(()), kto_drift(ratios))
        statistics = tuple(pairwise.summed(self.settings.beta * ratios).tolist())
        return super().metrics(EvalResult(losses.mean().item(), result.tokens, statistics))


def load(recipe: Recipe) -> DpoTask:
    """Load the task. Raises as `pairwise.load` does."""
    make = KtoTask if recipe.dpo.loss == "kto" else DpoTask
    return make(*pairwise.load(recipe, _rows), recipe.dpo)


def _rows(recipe: Recipe, stream: TokenStream, tokenizer: PreTrainedTokenizerFast) -> AnswerRows:
    return splits.padded(recipe, (AnswerRows, GroupedAnswerRows), stream, tokenizer.eos_token_id)


def _measured(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the answers' log-probabilities and their numbers of trained tokens, both (pairs, 2)."""
    lengths = (labels != IGNORE_INDEX).sum(dim=-1)
    return sequence_log_probabilities(logits, labels).view(-1, 2), lengths.view(-1, 2)
