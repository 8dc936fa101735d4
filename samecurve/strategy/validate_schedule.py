"""Checks what a recipe asks of a pipeline schedule: what was compared with one process is allowed, all else refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.specs.environment import dated
from samecurve.specs.tasks import TASKS
from samecurve.strategy.allowed import OFF, Value, rule
from samecurve.strategy.pipeline_schedules import SCHEDULES, micro_batch_rule

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

BLOCK = "parallelism_config"
SIZE, SCHEDULE = "parallelism_config_pp_size", "parallelism_config_pp_schedule"
# What a file's name claims
_WORDS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_FSDP_KEYS = ("fsdp_version", "fsdp_cpu_ram_efficient_loading")
_SEQUENCE = "parallelism_config_tp_sequence_parallel"
_CUT = ("GPipe", "1F1B", "Interleaved1F1B")  # with tensor parallelism
_UNTESTED = "has not been compared with one process under a pipeline schedule"
_ELSEWHERE = "configs/pipeline.yaml"
# By key: what is allowed, and why nothing else is.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "task": (
        tuple(name for name, spec in TASKS.items() if spec.scheduled),
        "only decoders can be split into stages, and its model is an encoder",
    ),
    "precision": (("fp32", "bf16"), f"fp16's loss scale {_UNTESTED}"),
    "optimizer.name": (("adamw", "lion", "sgd"), f"it {_UNTESTED}"),
    "fp8": (OFF, f"a layer of torchao {_UNTESTED}"),
    "model.kernels": (("torch", None), f"a Liger kernel {_UNTESTED}"),
    "memory.activation_checkpointing": (
        ("none", "full", "selective", "every_n_layers"),
        f"this kind of recomputation {_UNTESTED}",
    ),
    "memory.gradient_sync": (("auto",), f"the key {_UNTESTED}"),
    "numerics.compare_replicas_every_steps": (
        (0,),
        "replicas of a stage cannot be compared under a pipeline schedule yet",
    ),
}


def _applies(strategy: Strategy) -> bool:
    return strategy.family == "schedule"


def _compile(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    found, why, fix = value("compile"), "no process has the whole model", "use off or regional"
    if not _applies(strategy) or found in (*OFF, "auto"):
        return
    if not SCHEDULES[strategy.pipeline_schedule].takes_compiled_layers:
        why = f"{dated('torch')} computes wrong gradients of compiled layers whose backward pass is cut (zero bubble)"
        fix = f"use off, or {_ELSEWHERE}"
    elif found == "regional":
        return
    yield "compile", f"found {found}, but {why}; {fix}"


def _recomputation(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    found = value("memory.activation_checkpointing")
    if _applies(strategy) and not SCHEDULES[strategy.pipeline_schedule].takes_recomputation(found):
        why = f"{dated('torch')} cannot cut the backward pass of a layer that is recomputed in part (zero bubble)"
        yield "memory.activation_checkpointing", f"found {found}, but {why}; use full or none, or {_ELSEWHERE}"


def _loss(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    found = value("loss.implementation")
    allowed, why = ["auto", "chunked", "full"], f"Liger's kernel {_UNTESTED}"
    if found == "full" and strategy.tensor_parallel_size > 1:
        allowed.remove("full")
        why = "no rank of the last stage has whole logits"
    elif found == "chunked" and (spec := TASKS.get(value("task"))) and spec.has_teacher:
        allowed.remove("chunked")
        why = "the last stage needs the teacher's whole logits"
    if _applies(strategy) and found not in allowed:
        yield "loss.implementation", f"found {found}, but {why}; use {' or '.join(allowed)}, or another strategy"


def _cut_stages(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    if not _applies(strategy) or strategy.tensor_parallel_size == 1:
        return
    task = value("task")
    if (spec := TASKS.get(task)) and spec.scheduled and (spec.has_teacher or not spec.takes_chunks):
        why = "its loss needs the teacher's whole logits" if spec.has_teacher else "its loss needs whole rows"
        text = f"found {task}, but tensor-parallel stages compute the loss in chunks of tokens, and {why}"
        yield "task", f"{text}; set parallelism_config_tp_size to 1, or use another strategy"


def _micro_batches(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    if not _applies(strategy):
        return
    rows, given = value("batch.global_batch_size"), value("batch.micro_batch_size")
    size = 1 if given == "auto" else given
    if not all(isinstance(each, int) and each > 0 for each in (rows, size)):
        return  # reported by the recipe's own rules
    name, ranks = strategy.pipeline_schedule, strategy.pipeline_stages
    rows = -(-rows // strategy.data_parallel_size)  # of the fullest pipeline; all take as many micro-batches
    if takes := micro_batch_rule(name, -(-rows // size), ranks):
        fitting = [each for each in range(1, rows + 1) if not micro_batch_rule(name, -(-rows // each), ranks)]
        if given == "auto" and fitting:
            return  # a rehearsal tries these
        nearest = sorted(sorted(fitting, key=lambda each: abs(each - size))[:4])
        fix = f"use {' or '.join(map(str, nearest))}" if fitting else "raise batch.global_batch_size"
        text = f"found {given}, which makes {-(-rows // size)} micro-batches of {rows} rows"
        yield "batch.micro_batch_size", f"{text}, but {name} on {ranks} ranks takes {takes}; {fix}"


def check_accelerate(document: Document) -> None:
    """Add the problems of an Accelerate YAML that names only one of size and schedule, or mixes them with others."""
    size, schedule = document.get(BLOCK, SIZE), document.get(BLOCK, SCHEDULE)
    kind, names = document.get("distributed_type"), ", ".join(SCHEDULES)
    if size is None and schedule is None:
        return
    if size is None:
        document.problem((BLOCK, SIZE), f"missing, but {SCHEDULE} is {schedule}; set the number of pipeline ranks")
    elif schedule is None:
        document.problem((BLOCK, SCHEDULE), f"missing, but {SIZE} is {size}; set it to one of {names}")
    stem = Path(document.name).stem
    claimed = [_WORDS[word] for word in stem.split("_") if word in _WORDS]
    if schedule in SCHEDULES and claimed and schedule not in claimed:
        text = f"found {schedule}, but the file is called {stem}; rename the file or set it to {claimed[0]}"
        document.problem((BLOCK, SCHEDULE), text)
    if kind not in ("MULTI_GPU", "FSDP"):
        text = f"found {size}, but schedules run with distributed_type MULTI_GPU or FSDP, and it is {kind}"
        document.problem((BLOCK, SIZE), f"{text}; start from configs/pipeline_1f1b.yaml")
    if kind == "FSDP":
        _other_sizes(document)
    cut = document.get(BLOCK, "parallelism_config_tp_size")
    if cut not in (None, 1) and schedule in SCHEDULES and schedule not in _CUT:
        text = f"found {schedule}, but with tensor-parallel stages (parallelism_config_tp_size: {cut}) it {_UNTESTED}"
        document.problem((BLOCK, SCHEDULE), f"{text}; use {' or '.join(_CUT)}")
    if document.get(BLOCK, _SEQUENCE) is True:
        text = f"found true, but stages would pass on parts of the sequence, which {_UNTESTED}; set it to false"
        document.problem((BLOCK, _SEQUENCE), text)


def _other_sizes(document: Document) -> None:
    block = document.get("fsdp_config")
    for key in block if isinstance(block, dict) else {}:
        if key not in _FSDP_KEYS:
            text = f"FSDP inside pipeline stages gathers a layer once per step, and another setting {_UNTESTED}"
            document.problem(("fsdp_config", key), f"{text}; remove it")
    for key in ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "ep_size"):
        found = document.get(BLOCK, f"{BLOCK}_{key}")
        if found not in (None, 1):
            text = f"found {found}, but it {_UNTESTED}; remove it"
            text += ", since shards take all other processes" if "dp" in key else ""
            document.problem((BLOCK, f"{BLOCK}_{key}"), text)


_SHARED = (rule(_applies, key, allowed, why, "another strategy") for key, (allowed, why) in _ALLOWED.items())
RULES = (_compile, _recomputation, _loss, _cut_stages, _micro_batches, *_SHARED)
