"""torch.compile of a model's layers, in place, and how often it had to compile again.

What is compiled is the layer's `forward`: its weights keep their names, and what a strategy does around the layer (FSDP
gathers weights, DDP and ZeRO wait for gradients) stays outside. Layers that are alike share what was compiled.
Activation checkpointing comes first, so that the compiler sees what is to be recomputed: the order of torchtitan,
https://github.com/pytorch/torchtitan (models/llama3/parallelize.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from samecurve.models import fp8, liger
from samecurve.models.activation_checkpointing import checkpoint_layers, layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

# Of one function: with and without a mask, trained and evaluated, two kinds of layers, fixed and varying lengths make
# 16; torch's own limit is 8, beyond which it goes on uncompiled.
VARIANTS = 32
SETTLED_STEPS = 10


def prepare(model: PreTrainedModel, recipe: Recipe, device: torch.device, but: str = "") -> None:
    """Kernels, fp8, activation checkpointing and compilation as the recipe asks, before the strategy wraps the model.

    device: that the model will be computed on. but: the kind of activation checkpointing that the engine does itself.
    Raises what `activation_checkpointing.layers`, `liger.replace` and `fp8.convert` do.
    """
    liger.replace(model, recipe.model.kernels)
    fp8.convert(model, recipe, device)
    memory = recipe.memory
    offloads = memory.activation_checkpointing == "offload"
    if recipe.compile != "off":
        _configure(memory.activation_checkpointing, recipe.compile)
    if recipe.compile == "regional" and offloads:
        _compile_layers(model)  # inside, because what moves tensors to the host cannot be compiled
    if memory.activation_checkpointing != but:
        checkpoint_layers(model, memory)
    if recipe.compile == "regional" and not offloads:
        _compile_layers(model)
    elif recipe.compile == "full":
        model.forward = torch.compile(model.forward)


def _compile_layers(model: PreTrainedModel) -> None:
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward)


def _configure(checkpointing: str, kind: str) -> None:
    """Torch keeps these for the whole process."""
    config = torch._dynamo.config
    config.recompile_limit = VARIANTS
    # It would cut DDP's graph at its buckets, so that gradients are sent during the backward pass. Layers are such cuts
    # already, and it refuses what activation checkpointing puts into a graph.
    config.optimize_ddp = kind == "full" and checkpointing == "none"


class Recompilations:
    """Counts on this process how often something that was compiled before was compiled again, for another input.

    say: prints a line. The first one after SETTLED_STEPS steps is told with its reason. earlier: those of the sessions
    that this one goes on from.
    """

    def __init__(self, enabled: bool, say: Callable[[str], None], earlier: int = 0):
        self._enabled, self._say = enabled, say
        self._count, self._steps = earlier, 0
        self._told = self._evaluated = False

    def record(self, step: int) -> dict[str, int]:
        """{"recompilations": all so far}, or nothing when nothing is compiled. Call it once a step."""
        if not self._enabled:
            return {}
        reasons = _reasons()
        self._count += len(reasons)
        self._steps += 1
        news = [reason for reason in reasons if not self._first_evaluation(reason)]
        if news and self._steps > SETTLED_STEPS and not self._told:
            self._told = True
            self._say(f"step {step}: torch.compile compiled again (recompilation {self._count}): {news[0]}")
        return {"recompilations": self._count}

    def _first_evaluation(self, reason: str) -> bool:
        """It comes whenever it is due, and is the first to run without gradients."""
        first = "grad_mode" in reason and not self._evaluated
        self._evaluated |= first
        return first


def _reasons() -> list[str]:
    """One line for each recompilation since the last call. Torch notes a reason for what it had compiled before."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    found = [entry.recompile_reason for entry in get_compilation_metrics() if entry.recompile_reason]
    clear_compilation_metrics()  # it keeps only the last ones
    return [" ".join(reason.split("#")[0].split()) for reason in found]
