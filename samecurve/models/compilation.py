"""torch.compile of a model's layers, in place, and the count of recompilations.

Only the layer's `forward` is compiled: weights keep their names, and a strategy's hooks around the layer (FSDP gathers
weights, DDP and ZeRO wait for gradients) stay outside. Identical layers share the compiled code. Activation
checkpointing is applied first, so that the compiler sees the recomputation. That is torchtitan's order,
https://github.com/pytorch/torchtitan (models/llama3/parallelize.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.utils._triton import has_triton

from samecurve.models import bf16_copies, fp8, liger
from samecurve.models.activation_checkpointing import checkpoint_layers, layers
from samecurve.specs.environment import has_python_headers
from samecurve.specs.precision import COMPILED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

# Limit of compiled variants of one function. With and without a mask, in training and evaluation, two kinds of layers,
# fixed and varying lengths make 16; torch's default limit is 8, beyond which a function runs uncompiled.
VARIANTS = 32
SETTLED_STEPS = 10


def prepare(
    model: PreTrainedModel,
    recipe: Recipe,
    device: torch.device,
    but: str = "",
    is_cut: bool = False,
    copies: bool = False,
) -> None:
    """Apply the recipe's kernels, fp8, activation checkpointing and compilation before a strategy wraps the model.

    Args:
        model: the model, changed in place.
        recipe: the recipe.
        device: device of the computation.
        but: kind of activation checkpointing that the engine itself applies, "" for none.
        is_cut: whether tensor parallelism has cut the layers.
        copies: whether the layers compute in bf16 copies of their weights.

    Raises:
        ConfigurationError: as activation_checkpointing.layers, liger.replace and fp8.convert.
    """
    liger.replace(model, recipe.model.kernels)
    fp8.convert(model, recipe, device)
    if copies:
        bf16_copies.install_in_layers(model)
    memory = recipe.memory
    # Copies to the host cannot be compiled. A compiled recomputation of cut layers saves their mesh, which torch 2.13
    # takes for a tensor; selective checkpointing works, and only inside of the compiled layer.
    outside = ("offload", "full", "every_n_layers") if is_cut else ("offload",)
    compiles_first = memory.activation_checkpointing in outside
    if recipe.compile in COMPILED:
        config = torch._dynamo.config  # of the whole process
        config.recompile_limit = VARIANTS
        # optimize_ddp splits the graph at DDP's buckets, so that gradients are sent during the backward pass. Regional
        # compilation has these splits already, and optimize_ddp does not support activation checkpointing in a graph.
        config.optimize_ddp = recipe.compile == "full" and memory.activation_checkpointing == "none"
    if recipe.compile == "regional" and compiles_first:
        _compile_layers(model)
    if memory.activation_checkpointing != but:
        checkpoint_layers(model, memory)
    if recipe.compile == "regional" and not compiles_first:
        _compile_layers(model)
    elif recipe.compile == "full":
        # Build attention masks outside the compiled graph. Inside, transformers (5.23,
        # masking_utils.find_packed_sequence_indices) always builds a mask from position_ids, also for rows of one
        # document, and with a mask sdpa has no causal kernel: twice the FLOPs of attention. The families' own modules
        # import these functions by name.
        for module in {type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()}.values():
            for name, function in vars(module).copy().items():
                if getattr(function, "__module__", "") == "transformers.masking_utils" and name.startswith("create_"):
                    setattr(module, name, torch.compiler.disable(function))
        model.forward = torch.compile(model.forward)


def uncompiled(recipe: Recipe) -> AbstractContextManager:
    """Run compiled functions without their compiled code: another shape would compile the model once more."""
    return torch.compiler.set_stance("force_eager") if recipe.compile in COMPILED else nullcontext()


def has_triton_compiler(device: torch.device, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torch.compile can make kernels for this GPU: Triton is there, with a C compiler and Python's headers."""
    if device.type != "cuda" or not has_triton() or not has_python_headers():
        return False
    names = shlex.split(environ.get("CC", ""))[:1] or ("gcc", "clang")
    return any(shutil.which(name, path=environ.get("PATH", os.defpath)) for name in names)


def _compile_layers(model: PreTrainedModel) -> None:
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward)


class Recompilations:
    """Count of torch.compile's recompilations in this process.

    The first recompilation after SETTLED_STEPS steps is printed with its reason.

    Args:
        enabled: whether anything is compiled.
        log: prints a line.
        earlier: number of recompilations in the sessions that this one resumes.
    """

    def __init__(self, enabled: bool, log: Callable[[str], None], earlier: int = 0):
        self._enabled, self._log = enabled, log
        self._count, self._steps = earlier, 0
        self._warned = self._evaluated = False

    def record(self, step: int) -> dict[str, int]:
        """Return {"recompilations": total so far}, or {} if nothing is compiled. Call once per step."""
        if not self._enabled:
            return {}
        reasons = _reasons()
        self._count += len(reasons)
        self._steps += 1
        unexpected = []
        for reason in reasons:
            # expected of the first evaluation, the first run without gradients
            is_expected = "grad_mode" in reason and not self._evaluated
            self._evaluated |= is_expected
            if not is_expected:
                unexpected.append(reason)
        if unexpected and self._steps > SETTLED_STEPS and not self._warned:
            self._warned = True
            self._log(f"step {step}: torch.compile recompiled (recompilation {self._count}): {unexpected[0]}")
        return {"recompilations": self._count}


def _reasons() -> list[str]:
    """List the reasons, one line each, of the recompilations since the last call.

    torch records a reason only for a recompilation, not for a first compilation.
    """
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    reasons = [entry.recompile_reason for entry in get_compilation_metrics() if entry.recompile_reason]
    clear_compilation_metrics()  # torch keeps only the last ones
    return [" ".join(reason.split("#")[0].split()) for reason in reasons]  # "#": the guarded line of source follows
