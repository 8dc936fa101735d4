"""The rows of a recipe for contestants that are not samecurve, and what each of them writes down."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from samecurve.config.schema import Recipe
from samecurve.data.batches import StepBatches
from samecurve.data.micro_batch import MicroBatch
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.metrics.meter import peak_memory_bytes
from samecurve.models.fp32_weights import cast_weights
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weights import load_weights
from samecurve.specs.gpus import GIB
from samecurve.tasks import registry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Record:
    """Seconds, loss, trained tokens and the most memory so far of each step, written to a JSON file at the end."""

    def __init__(self, path: Path):
        self._path, self._last = path, 0.0
        self._steps: list[dict[str, float]] = []

    def start(self) -> None:
        self._last = time.perf_counter()

    def step(self, loss: float, tokens: int) -> None:
        now = time.perf_counter()
        self._steps.append({"loss": loss, "tokens": tokens, "step_seconds": now - self._last})
        self._steps[-1]["peak_memory_gib"] = peak_memory_bytes(DEVICE) / GIB
        self._last = now

    def write(self) -> None:
        self._path.write_text(json.dumps(self._steps))


class Timed(TrainerCallback):
    """Writes the steps of transformers' Trainer down. tokens: trained ones of each batch, `per_step` a step."""

    def __init__(self, record: Record, tokens: list[int], per_step: int = 1):
        self.record, self.tokens, self.per_step = record, tokens, per_step

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == 0:
            self.record.start()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in (logs or {}):
            last = state.global_step * self.per_step
            self.record.step(logs["loss"], sum(self.tokens[last - self.per_step : last]))


def batches(recipe: Recipe) -> list[list[MicroBatch]]:
    """Of all steps, in samecurve's order."""
    return list(StepBatches(registry.load_task(recipe).train, recipe.seed, recipe.batch, (0, 1), recipe.steps))


def model(recipe: Recipe, device: torch.device | None = None, ours: bool = False):
    """With samecurve's first weights, so that losses can be compared; fp32, unless the recipe's optimizer wants bf16.

    device: None is the CPU. ours: with the attention that samecurve chooses, and not with transformers' own choice.
    """
    task = registry.load_task(recipe)
    if recipe.model.attention == "auto" and not ours:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": "sdpa"})})
    architecture = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    made = construct(type(architecture), architecture.config, device or torch.device("cpu"))
    made = cast_weights(made, recipe.optimizer)
    tensors = {**dict(made.named_buffers()), **dict(made.named_parameters())}
    with torch.no_grad():
        load_weights(architecture, recipe, lambda name, full: tensors[name].copy_(full))
    return made


def trained(batch: MicroBatch) -> int:
    return int((batch.labels != IGNORE_INDEX).sum())
