"""Knowledge distillation: a student learns its teacher's distribution over the next token, and the token itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class DistillTask(causal_lm.CausalTask):
    """Weighted sum of the divergence from the teacher and the label loss.

    `loss`, `divergence` and `statistics` take the teacher's logits, (sequences, sequence_length, vocabulary), as the
    target `teacher`.

    Attributes:
        recipe: the run's recipe.
    """

    recipe: Recipe = field(kw_only=True)

    @property
    def teacher(self) -> Recipe:
        update = {"path": self.recipe.distill.teacher, "revision": None, "config": None, "new_head": False}
        update |= {"overrides": {}, "unproven": False}  # the header and card are the student's
        model = self.recipe.model.model_copy(update=update)
        # Without the recipe's chat template no tokens are added, so the teacher's embedding gets no untrained rows.
        tokenizer = self.recipe.tokenizer.model_copy(update={"chat_template": None})
        return self.recipe.model_copy(update={"model": model, "tokenizer": tokenizer, "adapter": Adapter()})

    def loss(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        weight = self.recipe.distill.label_weight
        divergence = self.divergence(logits, labels, teacher)
        return (1 - weight) * divergence + (weight * token_loss_sum(logits, labels) if weight else 0.0)

    def divergence(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence from the teacher in nats, summed over the trained tokens: an fp32 scalar.

        forward_kl is KL(teacher || student) and covers all modes of the teacher's distribution. reverse_kl is
        KL(student || teacher) and concentrates on its main modes. The sum is multiplied by the square of the
        temperature, which keeps the size of the gradients (Hinton et al., 2015, arXiv:1503.02531, section 2).
        """
        settings, trained = self.recipe.distill, labels != IGNORE_INDEX
        # Ids that only one of the two embeddings has stand for no token.
        size = min(logits.shape[-1], teacher.shape[-1])
        ours, theirs = (
            functional.log_softmax(scores[..., :size].float() / settings.temperature, dim=-1)
            for scores in (logits, teacher)
        )
        # torch's kl_div(input, target) is KL(target || input)
        pair = (ours, theirs) if settings.divergence == "forward_kl" else (theirs, ours)
        by_token = functional.kl_div(*pair, reduction="none", log_target=True).sum(dim=-1)
        # by a fill, because to select tokens by a mask waits for the device; the chunked loss has only trained ones
        return settings.temperature**2 * by_token.masked_fill(~trained, 0.0).sum()

    def statistics(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """Return (2,): the sum of the label loss and the sum of the divergence over the trained tokens."""
        return torch.stack([token_loss_sum(logits, labels), self.divergence(logits, labels, teacher)])

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return the metrics of CausalTask, with eval_loss as the training objective, and its two terms.

        eval_label_loss, eval_perplexity and eval_bits_per_byte measure the label loss alone.
        """
        label_loss, divergence = (total / max(result.tokens, 1) for total in result.statistics)
        metrics = super().metrics(replace(result, loss=label_loss))
        return {**metrics, "eval_loss": result.loss, "eval_label_loss": label_loss, "eval_divergence": divergence}


def load_task(recipe: Recipe) -> DistillTask:
    """Load the task.

    Raises:
        ConfigurationError: for a teacher with another vocabulary.
        DataError: see `sft.load`.
    """
    task = sft.load_task(recipe)
    teacher = recipe.distill.teacher
    assert teacher is not None  # a rule of the configuration
    known = task.tokenizer.get_vocab()
    theirs = tokenizer.load_pretrained_tokenizer(teacher, recipe.model.trust_remote_code).get_vocab()
    differing = sorted(token for token in known.keys() | theirs.keys() if known.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ConfigurationError(
            f"distill.teacher: the vocabulary of {teacher} has other ids for {len(differing)} tokens, for example "
            f"{theirs.get(token)} for {token!r}, which the student has as {known.get(token)}; use a teacher with the "
            "student's tokenizer, or set tokenizer.path to the teacher's"
        )
    return DistillTask(task.tokenizer, task.splits, task.details, recipe=recipe)
