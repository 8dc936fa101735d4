"""What a DeepSpeed JSON must not say although every key is legal: numbers that together do nothing or another thing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import Document, describe
from samecurve.config.rules_model import hidden_layers, model_type
from samecurve.config.source import RecipeSource
from samecurve.specs.model_families import FAMILIES
from samecurve.strategy.deepspeed_keys import STAGES

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy

_STAGE = ("zero_optimization", "stage")


def check_deepspeed(document: Document, strategy: Strategy, source: RecipeSource) -> None:
    _precision(document)
    _reduction(document, source)
    _offload(document, strategy)
    if strategy.family == "pipeline":
        _pipeline(document, strategy)
        _stages(document, strategy, source)
        _recomputation(document, source)
        _unsharded(document, source)
    else:
        _zero(document, strategy)


def _zero_block(document: Document) -> dict[str, Any]:
    block = document.get("zero_optimization")
    return block if isinstance(block, dict) else {}


def _precision(document: Document) -> None:
    if document.get("bf16", "enabled") is True and document.get("fp16", "enabled") is True:
        place = document.place(("bf16", "enabled"))
        document.problem(("fp16", "enabled"), f"bf16 is on too ({place}), and DeepSpeed takes one of them")


def _reduction(document: Document, source: RecipeSource) -> None:
    path = ("communication_data_type",)
    if document.get(*path) == "fp16" and _precision_asked(source) not in (None, "fp16"):
        text = f'found "fp16" (text), but gradients need a loss scale to fit into it, and {source.cite("precision")}'
        document.problem(path, f'{text}; use "fp32" or "bf16"')


def _zero(document: Document, strategy: Strategy) -> None:
    stage = document.get(*_STAGE)
    if stage is None:
        document.problem(_STAGE, "missing; add 1, 2 or 3")
    elif stage == 0 and not isinstance(stage, bool):
        document.problem(_STAGE, "found 0, which shards nothing; choose configs/ddp.yaml, or a stage from 1 to 3")
    for key, value in _zero_block(document).items():
        stages = STAGES.get(key, (stage,))
        if strategy.zero_stage and stage not in stages and not _switched_off(value):
            readers = " and ".join(map(str, stages))
            text = f"only stage {readers} reads it, and zero_optimization.stage is {stage}; remove it"
            document.problem(("zero_optimization", key), text)


def _switched_off(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") == "none"


def _offload(document: Document, strategy: Strategy) -> None:
    low_stage = strategy.zero_stage in (1, 2)
    for part in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", part)
        device = document.get(*path, "device")
        if device == "nvme" and document.get(*path, "nvme_path") is None:
            document.problem((*path, "nvme_path"), "missing; add a folder on a local disk")
        if device == "nvme" and part == "offload_optimizer" and low_stage:
            text = (
                f'stage {strategy.zero_stage} offloads to the CPU instead, without a word; write "cpu" or use stage 3'
            )
            document.problem((*path, "device"), f"found {describe(device)}, but {text}")
        if device in ("cpu", "nvme") and strategy.family == "pipeline":
            document.problem(path, "a pipeline cannot offload here; remove it")
    ratio = document.get("zero_optimization", "offload_optimizer", "ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and low_stage:
        text = f"found {ratio}, but only stage 3 offloads a part, and zero_optimization.stage is {strategy.zero_stage}"
        document.problem(("zero_optimization", "offload_optimizer", "ratio"), text)


def _pipeline(document: Document, strategy: Strategy) -> None:
    if strategy.zero_stage > 1:
        text = f"found {strategy.zero_stage}, but a pipeline works with stage 0 or 1 only; set it to 1"
        document.problem(_STAGE, text)
    for key, value in _zero_block(document).items():
        if value == "auto":
            text = 'found "auto", but Accelerate, which knows that word, does not prepare a pipeline; write a number'
            document.problem(("zero_optimization", key), text)


def _stages(document: Document, strategy: Strategy, source: RecipeSource) -> None:
    stages, layers = document.get("pipeline", "stages"), hidden_layers(source)
    if stages is None:
        document.problem(("pipeline", "stages"), "missing; add how many stages the layers are cut into")
    elif layers is not None and strategy.pipeline_stages > layers:
        text = f"found {stages}, but the recipe's model has {layers} layers; a stage needs at least one"
        document.problem(("pipeline", "stages"), text)

    family = model_type(source)
    if family is not None and family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        text = f"it cannot cut the recipe's model, whose model_type is {family}; it can cut {known}"
        document.problem(("pipeline",), f"{text}; use one of these or another strategy")


def _unsharded(document: Document, source: RecipeSource) -> None:
    """What DeepSpeed's pipeline lacks without ZeRO: loss scaling and another dtype of accumulation than bf16's own."""
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
    document.problem(_STAGE, f"a pipeline of stage 0, which is also the default, {lack}; set it to 1")


def _precision_asked(source: RecipeSource) -> str | None:
    with contextlib.suppress(KeyError):
        return source.value("precision")
    return None


def _recomputation(document: Document, source: RecipeSource) -> None:
    """The recipe says whether to recompute; the interval only how many layers go together."""
    owner, path = "memory.activation_checkpointing", ("pipeline", "activation_checkpoint_interval")
    interval = document.get(*path)
    if not isinstance(interval, int) or interval <= 0 or source.document.get(*owner.split(".")) == "full":
        return
    document.problem(
        path, f"found {interval}, but the recipe owns recomputation: {source.cite(owner)}; make them agree"
    )
