"""Distillation: a student learns to say of each token what its teacher does, and what stands there."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from samecurve.config.schema import Adapter
from samecurve.data import tokenizer
from samecurve.errors import ConfigurationError
from samecurve.losses.cross_entropy import IGNORE_INDEX, token_loss_sum
from samecurve.tasks import causal_lm, sft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class DistillTask(causal_lm.CausalTask):
    """recipe: the run's. Among the targets is `teacher`: its logits, (sequences, sequence_length, vocabulary)."""

    recipe: Recipe | None = None

    @property
    def teacher(self) -> Recipe:
        theirs = {"path": self.recipe.distill.teacher, "config": None, "new_head": False}
        model = self.recipe.model.model_copy(update=theirs)
        # its embedding gets no rows that it was not trained with
        tokenizer = self.recipe.tokenizer.model_copy(update={"chat_template": None})
        return self.recipe.model_copy(update={"model": model, "tokenizer": tokenizer, "adapter": Adapter()})

    def loss(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        weight = self.recipe.distill.label_weight
        divergence = self.divergence(logits, labels, teacher)
        return (1 - weight) * divergence + (weight * token_loss_sum(logits, labels) if weight else 0.0)

    def divergence(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """fp32 scalar, in nats: summed over the trained tokens, times the temperature's square, which keeps the
        gradient's size (Hinton et al., 2015, arXiv:1503.02531, section 2).

        forward_kl: KL(teacher || student), which covers all that the teacher says; reverse_kl: KL(student || teacher),
        which keeps to what it says mostly. Ids that only one of the two embeddings has stand for no token.
        """
        settings, trained = self.recipe.distill, labels != IGNORE_INDEX
        size = min(logits.shape[-1], teacher.shape[-1])
        student, wanted = (
            functional.log_softmax(found[trained][..., :size].float() / settings.temperature, dim=-1)
            for found in (logits, teacher)
        )
        pair = (student, wanted) if settings.divergence == "forward_kl" else (wanted, student)
        return settings.temperature**2 * functional.kl_div(*pair, reduction="sum", log_target=True)

    def statistics(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """(2,): the sums of the label loss and of the divergence."""
        return torch.stack([token_loss_sum(logits, labels), self.divergence(logits, labels, teacher)])

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """eval_loss is what is trained on; eval_label_loss, perplexity and bits per byte are of the tokens alone."""
        label_loss, divergence = (total / max(result.tokens, 1) for total in result.statistics)
        found = super().metrics(replace(result, loss=label_loss))
        return {**found, "eval_loss": result.loss, "eval_label_loss": label_loss, "eval_divergence": divergence}


def load(recipe: Recipe) -> DistillTask:
    """Errors: see sft.load; ConfigurationError for a teacher with another vocabulary."""
    task = sft.load(recipe)
    _check_vocabulary(task.tokenizer, recipe)
    return DistillTask(**{field.name: getattr(task, field.name) for field in fields(task)}, recipe=recipe)


def _check_vocabulary(ours: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    teacher = recipe.distill.teacher
    known = ours.get_vocab()
    theirs = tokenizer.load_pretrained_tokenizer(teacher, recipe.model.trust_remote_code).get_vocab()
    differing = sorted(token for token in known.keys() | theirs.keys() if known.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ConfigurationError(
            f"distill.teacher: {teacher} numbers {len(differing)} tokens otherwise, for example {token!r}: "
            f"{theirs.get(token)} there, {known.get(token)} here; use a teacher with the student's tokenizer, or set "
            "tokenizer.path to the teacher's"
        )
