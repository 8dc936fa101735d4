"""Limits of the formulas. They describe training all weights of a causal language model."""

from __future__ import annotations

import json

from samecurve.config.documents import Document
from samecurve.config.schema import Adapter, Memory, Recipe
from samecurve.errors import ConfigurationError
from samecurve.planner.hardware import Gpu
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.specs.tasks import TASKS

# Kinds of memory.activation_checkpointing that are counted as another one, and what to tell of it.
APPROXIMATED = {
    "offload": ("full", "full, with the inputs on the device"),
    "every_n_layers": ("none", "none"),
    "selective, attention": ("full", "full, without the results of attention"),
}


def refuse(recipe: Recipe, document: Document | None = None) -> None:
    """Raise ConfigurationError for a recipe that needs a small part of the predicted memory, or much more.

    Args:
        recipe: without errors.
        document: where it was read, for the place of the key.
    """

    def place(*path: str) -> str:
        return f"{document.place(path)}: " if document else ""

    if recipe.adapter.name:
        raise ConfigurationError(
            f"{place('adapter', 'name')}adapter.name: found {recipe.adapter.name}, but the formulas are those of "
            f"training all weights; {' '.join(_without_adapter(recipe.adapter))} plans that, an upper bound"
        )
    if TASKS[recipe.task].has_teacher:
        raise ConfigurationError(f"{place('task')}task: found {recipe.task}, but the formulas do not cover a teacher")
    if recipe.batch.is_auto:
        raise ConfigurationError(
            f"{place('batch', 'micro_batch_size')}batch.micro_batch_size: found auto, but only train.py and rehearse "
            "look for the number; give one, or leave the key out of the recipe to search over it"
        )


def _without_adapter(adapter: Adapter) -> list[str]:
    """Return the overrides that take an adapter out of a recipe: every key goes back to its default."""
    changed = {key: getattr(Adapter(), key) for key, value in adapter if value != getattr(Adapter(), key)}
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changed.items()}
    return [f"adapter.{key}={value}" for key, value in shown.items()]


def left_out(recipe: Recipe, card: Gpu) -> list[str]:
    """List what the prediction for a GPU does not count, for the reader."""
    found: list[str] = []
    if recipe.precision == "fp32":
        slower = "products are counted at bf16 rates, for want of others (device.peak_tflops.fp32 of a cluster file)"
        smaller = "activations of models without gated MLPs are counted in 16 bits"
        told = smaller if card.fp32_tflops else f"{slower}, and {smaller}"
        more = "more memory" if card.fp32_tflops else "more memory and time"
        found.append(f"precision fp32. {told[0].upper()}{told[1:]}: expect {more}")
    if not TASKS[recipe.task].predicts_next_token:
        found.append(f"task {recipe.task}. Each row is counted as one text through a language model with its head")
    if recipe.task == "dpo" and recipe.dpo.has_reference:
        found.append(
            "task dpo. The reference's log-probabilities, computed once before the first step, are not counted"
        )
    if kind := APPROXIMATED.get(_kind(recipe.memory)):
        asked = f"memory.activation_checkpointing {recipe.memory.activation_checkpointing}"
        found.append(f"{asked}. It is counted as {kind[1]}")
    if recipe.optimizer.name == "adamw_bf16":
        found.append("optimizer.name adamw_bf16. Weights and states are counted in fp32: expect less memory")
    if recipe.fp8 != "off" and not card.fp8_tflops:
        found.append(f"fp8 {recipe.fp8}. Products are those of bf16, because no rate of this GPU is known")
    if recipe.model.kernels == "liger":
        found.append("model.kernels liger. Norms, rotary positions and gated activations are counted as PyTorch's")
    if recipe.loss.implementation == "liger":
        found.append("loss.implementation liger. It is counted as chunked, head and loss a few tokens at a time")
    if recipe.compile == "auto":
        found.append("compile auto. The layers are counted uncompiled; a run that compiles them needs less")
    return found


def checkpointing(memory: Memory) -> str:
    """Return how the formulas count a recipe's activation checkpointing: as none, selective or full."""
    return APPROXIMATED.get(_kind(memory), (memory.activation_checkpointing, ""))[0]


def _kind(memory: Memory) -> str:
    kind = memory.activation_checkpointing
    return f"{kind}, attention" if kind == "selective" and memory.selective_save == "attention" else kind


def optimizer_bytes(recipe: Recipe) -> int:
    """Bytes per parameter of the optimizer's states, without the fp32 weights."""
    states = len(OPTIMIZERS[recipe.optimizer.name].states)
    return states if recipe.optimizer.name == "adamw_8bit" else 4 * states  # 8 bits each, else fp32
