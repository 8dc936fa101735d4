"""Checks a DeepSpeed JSON for combinations of values that have no effect, or not the effect that they suggest."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from samecurve.config.documents import Document, describe
from samecurve.config.rules_model import hidden_layers, model_type
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.specs.environment import dated
from samecurve.specs.model_families import PIPELINED

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy

_STAGE = ("zero_optimization", "stage")


def check_deepspeed(document: Document, strategy: Strategy, source: RecipeSource) -> None:
    """Add the problems of a DeepSpeed JSON, alone and together with the recipe, to its document."""
    _reduction(document, strategy, source)
    for part in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", part)
        device = document.get(*path, "device")
        if device == "nvme" and document.get(*path, "nvme_path") is None:
            document.problem((*path, "nvme_path"), "missing; set it to a folder on a local disk")
        if device == "nvme" and part == "offload_optimizer" and strategy.zero_stage in (1, 2):
            text = f'ZeRO stage {strategy.zero_stage} silently offloads to the CPU instead; write "cpu" or use stage 3'
            document.problem((*path, "device"), f"found {describe(device)}, but {text}")
        if device in ("cpu", "nvme") and strategy.schedule:
            document.problem(path, f"the pipeline of {dated('deepspeed')} does not offload; remove it")
    if strategy.secondary_partition > 1 and any(part.startswith("param:") for part in strategy.offload):
        text = f"found {strategy.secondary_partition}, but a second copy of offloaded weights has not been compared "
        text += "with one process; remove it or offload_param"
        document.problem(("zero_optimization", "zero_hpz_partition_size"), text)
    if strategy.schedule:
        _pipeline(document, strategy, source)
        _unsharded(document, source)


def _reduction(document: Document, strategy: Strategy, source: RecipeSource) -> None:
    stage, scatters = strategy.zero_stage, document.get("zero_optimization", "reduce_scatter") is not False
    for key, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        value = document.get(key)
        if value in (None, usual) or stage not in (2, 3):
            continue
        why, instead = f"{dated('deepspeed')} at stage {stage} supports it only without reduce-scatter", "remove it"
        if stage == 3 and key == "gradient_predivide_factor":  # runtime/zero/stage3.py, __avg_scatter_contiguous_grads
            why = f"{dated('deepspeed')} at stage 3 does not undo a factor that equals the number of ranks"
        elif scatters:
            instead += ", or set zero_optimization.reduce_scatter to false"
        else:
            continue
        document.problem((key,), f"found {describe(value)}, but {why}; {instead}")
    path = ("communication_data_type",)
    if document.get(*path) == "fp16" and _precision_asked(source) not in (None, "fp16"):
        text = f'found "fp16" (text), but fp16 gradients need a loss scale, and {source.cite("precision")}'
        document.problem(path, f'{text}; use "fp32" or "bf16"')


def _pipeline(document: Document, strategy: Strategy, source: RecipeSource) -> None:
    if strategy.zero_stage > 1:
        text = f"found {strategy.zero_stage}, but a pipeline supports stage 0 or 1 only; set it to 1"
        document.problem(_STAGE, text)
    block = document.get("zero_optimization")
    for key, value in block.items() if isinstance(block, dict) else ():
        if value == "auto":
            text = 'found "auto", which only Accelerate resolves, and it does not prepare a pipeline; write a number'
            document.problem(("zero_optimization", key), text)

    stages, layers = document.get("pipeline", "stages"), hidden_layers(source)
    if stages is None:
        document.problem(("pipeline", "stages"), "missing; set the number of stages to split the layers into")
    elif layers is not None and strategy.dims.pp > layers:
        text = f"found {stages}, but each stage needs a layer and the model has {layers}; use at most {layers}"
        document.problem(("pipeline", "stages"), text)
    family = model_type(source)
    if family is not None and family not in PIPELINED:
        known = ", ".join(sorted(PIPELINED))
        text = f"a pipeline cannot split a model of model_type {family}, only {known}"
        document.problem(("pipeline",), f"{text}; use one of these or another strategy")

    # the recipe says whether to recompute; the interval only says how many layers are recomputed together
    owner, path = "memory.activation_checkpointing", ("pipeline", "activation_checkpoint_interval")
    interval = document.get(*path)
    asked = isinstance(interval, int) and interval > 0
    if asked and source.document.get(*owner.split(".")) != "full":
        text = f"found {interval}, but the recipe sets recomputation: {source.cite(owner)}; remove it"
        document.problem(path, f"{text}, or set that to full")


def _unsharded(document: Document, source: RecipeSource) -> None:
    """DeepSpeed's pipeline without ZeRO lacks loss scaling, and accumulates bf16 gradients in bf16 only."""
    precision, accumulation = _precision_asked(source), document.get("data_types", "grad_accum_dtype")
    if document.get(*_STAGE) not in (None, 0):
        return
    if precision == "fp16":
        lack = f"does not scale the loss, and {source.cite('precision')}"
    elif precision == "bf16" and accumulation not in (None, "bf16"):
        place = document.place(("data_types", "grad_accum_dtype"))
        lack = f"sums bf16 gradients in bf16, and data_types.grad_accum_dtype is {describe(accumulation)} ({place})"
    else:
        return
    document.problem(_STAGE, f"a pipeline with stage 0 (also the default) {lack}; set it to 1")


def _precision_asked(source: RecipeSource) -> str | None:
    with contextlib.suppress(InvalidValue):
        return source.value("precision")
    return None
