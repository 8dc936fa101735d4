"""A training job apart from its strategy and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samecurve.config.schema import Recipe
from samecurve.config.schema_training import Batch
from samecurve.config.source import RecipeSource
from samecurve.planner import coverage, model_config
from samecurve.planner.shape import ModelShape
from samecurve.specs.compilation import COMPILED
from samecurve.specs.model_families import EAGER, VARLEN, WHOLE_LOGITS, attention_dropout
from samecurve.specs.tasks import TASKS

ADAM = 8


@dataclass(frozen=True)
class Wanted:
    """A training job apart from strategy and machines.

    Attributes:
        source: the recipe as written, by which the strategies' own rules judge.
        optimizer_bytes: of its states, per parameter.
        fixed: of "micro_batch" and "checkpointing", those that a search must leave as they are.
        family: the model's `model_type`, "" if it is not known.
        attention: as `model.attention`; auto where a CPU computes varlen, and a GPU sdpa.
        fp8: as the recipe's `fp8`; "" for none.
        compile: whether layers are compiled; not where `auto` has still to decide.
        known: what `strategies.describe` has found out about a source, a shape and a family, also of changed copies.
    """

    shape: ModelShape
    batch: Batch
    source: RecipeSource
    precision: str = "bf16"
    checkpointing: str = "none"
    chunked_loss: bool = True
    optimizer_bytes: int = ADAM
    fixed: frozenset[str] = frozenset()
    attention: str = "sdpa"
    fp8: str = ""
    compile: bool = False
    family: str = ""
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_recipe(
        cls,
        source: RecipeSource,
        fields: Mapping[str, Any],
        name: str,
        vocab: int | None = None,
        fixed: frozenset[str] = frozenset(),
    ) -> Wanted:
        """Describe what a recipe trains.

        Args:
            source: of a recipe without errors.
            fields: of the model's Hugging Face config.
            name: of the config, for messages.
            vocab: size of a tokenizer that is trained for the job.
            fixed: see the class.

        Raises:
            ConfigurationError: the config lacks a dimension.
        """
        recipe = source.recipe
        assert recipe is not None
        return cls(
            model_config.shape(fields, name, vocab),
            recipe.batch,
            source,
            recipe.precision,
            coverage.checkpointing(recipe.memory),
            _has_chunked_loss(recipe, fields),
            coverage.optimizer_bytes(recipe),
            fixed,
            _attention(recipe, fields),
            "" if recipe.fp8 == "off" else recipe.fp8,
            recipe.compile in COMPILED,
            str(fields.get("model_type") or ""),
        )

    def with_memory(self, micro_batch: int, checkpointing: str) -> Wanted:
        """Change what may be changed without changing the curve."""
        batch = self.batch.model_copy(update={"micro_batch_size": micro_batch})
        return replace(self, batch=batch, checkpointing=checkpointing)

    def rows_of_a_rank(self, ranks: int) -> int:
        """Rows of a step that the fullest data-parallel rank reads."""
        return self.batch.rows_per_rank(ranks)[0]


def _has_chunked_loss(recipe: Recipe, fields: Mapping[str, Any]) -> bool:
    """Decide as engines/loss_implementation.py."""
    chunks = recipe.loss.implementation != "full" and recipe.precision != "fp16" and TASKS[recipe.task].takes_chunks
    return chunks and fields.get("model_type") not in WHOLE_LOGITS and not fields.get("final_logit_softcapping")


def _attention(recipe: Recipe, fields: Mapping[str, Any]) -> str:
    """Decide as models/attention/choice.py, which needs torch, while nothing is measured on a GPU."""
    asked = recipe.model.attention
    if asked != "auto":
        return asked
    if fields.get("model_type") in EAGER:
        return "eager"
    has_varlen = fields.get("model_type") in VARLEN and not attention_dropout(fields)
    gains = recipe.precision == "bf16" and TASKS[recipe.task].auto_class == "AutoModelForCausalLM"
    return "auto" if has_varlen and gains else "sdpa"
