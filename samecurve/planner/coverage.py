"""What of a recipe the formulas cover. They describe training all weights of a causal language model."""

from __future__ import annotations

from collections.abc import Sequence

from samecurve.config import loader
from samecurve.config.schema import Recipe
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.specs.optimizers import OPTIMIZERS

COVERED_TASKS = ("pretrain", "continue_pretrain", "sft")
COVERED_CHECKPOINTING = ("none", "full", "selective")


def read_recipe(path: str, overrides: Sequence[str]) -> RecipeSource:
    """Read a recipe. Its data may be missing here: they lie on the machines that are planned for."""
    source = loader.read_recipe(path, overrides)
    if source.recipe is not None:
        problems = source.document.problems
        problems[:] = [each for each in problems if each.key not in ("data.path", "evaluate.path")]
    return source


def refuse(recipe: Recipe) -> None:
    """Raise ConfigurationError for a recipe that needs a small part of the predicted memory, or much more."""
    if recipe.adapter.name:
        raise ConfigurationError(
            f"adapter.name: found {recipe.adapter.name}, but the formulas are those of training all weights; "
            "adapter.name=null plans that, an upper bound"
        )
    if recipe.task == "distill":
        raise ConfigurationError("task: found distill, but the formulas do not cover a teacher")


def left_out(recipe: Recipe) -> list[str]:
    """List what the prediction does not count, for the reader."""
    found = []
    if recipe.precision == "fp32":
        found.append("precision fp32. Products and activations are those of bf16: expect more memory and a slower step")
    if recipe.task not in COVERED_TASKS:
        found.append(f"task {recipe.task}. Each row is counted as one text through a language model with its head")
    if recipe.memory.activation_checkpointing not in COVERED_CHECKPOINTING:
        found.append(f"memory.activation_checkpointing {recipe.memory.activation_checkpointing}, only approximately")
    if recipe.optimizer.name == "adamw_bf16":
        found.append("optimizer.name adamw_bf16. Weights and states are counted in fp32: expect less memory")
    if recipe.fp8 != "off":
        found.append(f"fp8 {recipe.fp8}. Products are those of bf16")
    if recipe.compile != "off":
        found.append(f"compile {recipe.compile}")
    if recipe.model.attention == "eager":
        found.append("model.attention eager. The attention scores are counted as a fused kernel's: expect more memory")
    return found


def optimizer_bytes(recipe: Recipe) -> int:
    """Bytes per parameter of the optimizer's states, without the fp32 weights."""
    states = len(OPTIMIZERS[recipe.optimizer.name].states)
    return states if recipe.optimizer.name == "adamw_8bit" else 4 * states
