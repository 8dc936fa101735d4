"""Checks the strategy's files, alone and together with the recipe. Findings become problems of the documents."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import Document, Finding, KeyPath, describe, suggest
from samecurve.config.rules_training import check_ranks
from samecurve.config.section import LARGEST_INTEGER
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.specs.data_names import WIDTH_MULTIPLE
from samecurve.strategy import capabilities, validate_deepspeed
from samecurve.strategy.accelerate_keys import ACCELERATE, INLINE, NoEffect, Rejected, Table, ValueRule
from samecurve.strategy.capabilities import CONTEXT, EXPERT, TENSOR, TORCH_PIPELINE, Mode
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.recipe_values import conflicts
from samecurve.strategy.timetables import SCHEDULES, micro_batch_rule
from samecurve.strategy.world_size import world_problems

if TYPE_CHECKING:
    from samecurve.strategy.launchers import Launch
    from samecurve.strategy.plan import Files, Strategy

Value = Callable[[str], Any]
_SEQUENCE = "parallelism_config_tp_sequence_parallel"
AUTO_COMPILE_STEPS = 1000  # from which on `compile: auto` compiles (assumed: fewer seldom repay a minute of compiling)


def check_strategy(source: RecipeSource, files: Files, strategy: Strategy, launch: Launch) -> list[str]:
    """Add the problems of both strategy files, of the world size and of the batch to their documents.

    Args:
        source: the recipe as written; gets the problems of its own keys and of the world size.
        files: the strategy's documents; get the problems of their own keys.
        strategy: what the files describe, from `resolve.describe_strategy`.
        launch: the launcher and its number of processes.

    Returns:
        Lines for the user about how the files were read, and about names that promise another strategy.
    """
    if files.accelerate.content:
        _walk(files.accelerate, ACCELERATE)
        check_parallelism(files.accelerate)
    if files.deepspeed.content:
        _walk(files.deepspeed, DEEPSPEED)
        validate_deepspeed.check_deepspeed(files.deepspeed, strategy, source)
    if files.deepspeed.name == files.accelerate.name:  # made of the YAML's keys
        keys = {".".join(path): f"deepspeed_config.{key}" for key, path in INLINE.items()}
        problems = [replace(problem, key=keys.get(problem.key, problem.key)) for problem in files.deepspeed.problems]
        files.deepspeed.problems = problems
    source.document.problems += conflicts(source, files, strategy.dims.dp)
    for key in capabilities.KEYS:
        with contextlib.suppress(InvalidValue):
            for text in capabilities.problems(source.value, strategy, key):
                source.document.problem(tuple(key.split(".")), text)
    for rule in (_sequence, _micro_batches):
        with contextlib.suppress(InvalidValue):
            for key, text in rule(source.value, strategy):
                source.document.problem(tuple(key.split(".")), text)
    wrong_world = [*launch.problems, *world_problems(files, strategy, launch)]
    source.document.problems += wrong_world
    if not wrong_world:  # else these are not the ranks that were meant
        check_ranks(source, strategy.world_size)
    return [*files.notes, *_names(files, strategy)]


def can_compile(strategy: Strategy, kind: str) -> bool:
    """Whether a strategy takes a value of the recipe's key `compile`."""
    return not any(capabilities.problems({"compile": kind}.__getitem__, strategy, "compile"))


def choose_compile(strategy: Strategy, steps_left: int) -> tuple[str, str]:
    """Choose what `compile: auto` means: regional where the strategy allows it and many steps are left.

    Args:
        steps_left: number of steps until the end of the run.

    Returns:
        The value of `compile`, and the reason.
    """
    if not can_compile(strategy, "regional"):
        return "off", f"{strategy.name} cannot be compiled"
    kind, compared = ("off", "fewer than") if steps_left < AUTO_COMPILE_STEPS else ("regional", "at least")
    return kind, f"{steps_left:,} steps are left, {compared} {AUTO_COMPILE_STEPS:,}"


def _sequence(value: Value, strategy: Strategy) -> Iterator[Finding]:
    size, ranks = value("batch.sequence_length"), strategy.dims.tp
    where = f"{ranks} ranks ({strategy.path}: {_SEQUENCE})"
    if strategy.tp_sequence_parallel and size % ranks:
        fix = f"use a multiple of {ranks}, or set {_SEQUENCE} to false"
        yield "batch.sequence_length", f"found {size}, which cannot be divided over {where}; {fix}"
    # shorter rows are all padded to sequence_length, which is checked above
    grouped = value("data.group_by_length") and size > WIDTH_MULTIPLE
    if strategy.tp_sequence_parallel and grouped and WIDTH_MULTIPLE % ranks:
        text = f"found true, so rows are padded to multiples of {WIDTH_MULTIPLE} tokens, which cannot be divided over"
        yield "data.group_by_length", f"{text} {where}; set it or {_SEQUENCE} to false"


def _micro_batches(value: Value, strategy: Strategy) -> Iterator[Finding]:
    if strategy.torch_schedule is None:
        return
    rows, given = value("batch.global_batch_size"), value("batch.micro_batch_size")
    size = 1 if given == "auto" else given
    if not all(isinstance(number, int) and number > 0 for number in (rows, size)):
        return  # reported by the recipe's own rules
    name, ranks = strategy.schedule, strategy.dims.pp
    rows = -(-rows // strategy.dims.dp)  # of the fullest pipeline; all take as many micro-batches
    if takes := micro_batch_rule(name, -(-rows // size), ranks):
        fitting = [number for number in range(1, rows + 1) if not micro_batch_rule(name, -(-rows // number), ranks)]
        if given == "auto" and fitting:
            return  # a rehearsal tries these
        nearest = sorted(sorted(fitting, key=lambda number: abs(number - size))[:4])
        fix = f"use {' or '.join(map(str, nearest))}" if fitting else "raise batch.global_batch_size"
        text = f"found {given}, which makes {-(-rows // size)} micro-batches of {rows} rows"
        yield "batch.micro_batch_size", f"{text}, but {name} on {ranks} ranks takes {takes}; {fix}"


def _walk(document: Document, table: Table, path: KeyPath = ()) -> None:
    """Compare every key with the table, at every level."""
    block = document.get(*path)
    for key, value in block.items():
        here, rule = (*path, key), table.get(key)
        if rule is None:
            whole = ACCELERATE if table is ACCELERATE or path and path[0] in ACCELERATE else DEEPSPEED
            document.problem(here, "unknown key" + suggest(here, _honoured(whole)))
        elif isinstance(rule, dict) and isinstance(value, dict):
            _walk(document, rule, here)
        else:
            text = complaint(rule, value)
            if text:
                document.problem(here, text)


def complaint(rule: Any, value: Any) -> str | None:
    """Say what is wrong with a key's value by its rule from a table of keys; None if nothing is.

    translation.py has taken out what the recipe owns and what has no effect, unless its value is wrong.
    """
    rule = rule.rule if isinstance(rule, NoEffect) else rule
    if isinstance(rule, dict):
        return None if value is None else f"found {describe(value)}, expected a block of keys"
    if isinstance(rule, ValueRule):
        if not rule.accepts(value):
            return f"found {describe(value)}, expected {rule.expected}"
        too_large = isinstance(value, (int, float)) and abs(value) > LARGEST_INTEGER
        return f"found {describe(value)}, expected a number of at most {LARGEST_INTEGER}" if too_large else None
    # by type, too: for Python 0 == False and 1 == True
    harmless = any(value == allowed and type(value) is type(allowed) for allowed in rule.harmless)
    return None if harmless else f"found {describe(value)}, but {rule.reason}"


def _honoured(table: Table, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, rule in table.items():
        if not isinstance(rule, Rejected):  # what is refused is not suggested
            yield (*path, key)
        if isinstance(rule, dict):
            yield from _honoured(rule, (*path, key))


# Words of a file's name, and the pipeline schedules that they promise
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
_SCHEDULES |= {"dualpipev": "DualPipeV"}
_NAMED = re.compile(r"(zero[0123]|fsdp|hsdp|ddp|tp|pipeline|pp|single)(_|$)")


def _names(files: Files, strategy: Strategy) -> Iterator[str]:
    """Yield a line for each file whose name promises another strategy than it configures: zero2_offload offloads.

    Skipped where the strategy itself is invalid. A JSON is read in place of a YAML of the same name.
    """
    for document in (files.accelerate, files.deepspeed):
        stem = Path(document.name).stem
        claimed = _NAMED.match(stem)
        if not claimed or document.problems:
            continue
        truth = {"zero": f"zero{strategy.zero_stage}", "fsdp": "hsdp" if strategy.replicate_size > 1 else "fsdp"}
        truth |= {"schedule": "pp" if claimed[1] == "pp" else "pipeline"}
        it_is = truth.get(strategy.family, strategy.family)
        by_heads = strategy.context_parallel == "ulysses"
        sizes = {
            "tp": strategy.dims.tp,
            "ulysses": strategy.dims.cp if by_heads else 1,
            "cp": 1 if by_heads else strategy.dims.cp,
            "ep": strategy.dims.ep,
            "hpz": strategy.secondary_partition,
        }
        actual = [it_is, *(word for word, size in sizes.items() if size > 1 and word != it_is)]
        if strategy.offload:
            actual.append("nvme" if any(target.endswith("nvme") for target in strategy.offload) else "offload")
        named = {word for word in re.split("[_-]", stem) if word in {*sizes, "offload", "nvme"} and word != claimed[1]}
        promised = [_SCHEDULES[word] for word in stem.split("_") if word in _SCHEDULES]
        if strategy.torch_schedule and promised and strategy.schedule not in promised:
            actual.append(strategy.schedule)
            named.add(promised[0])
        if (claimed[1], named) != (it_is, {*actual[1:]} - {"offload" if "nvme" in named else ""}):
            yield f"{document.name} configures {' with '.join(actual)}, whatever its name says"


_BLOCK = "parallelism_config"
_BLOCKS = {"fsdp_config": ("FSDP",), "parallelism_config": ("FSDP", "MULTI_GPU"), "deepspeed_config": ("DEEPSPEED",)}
_DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
_CUTS_SEQUENCE = "tp_sequence_parallel"
_OF_MODES = {TENSOR: ("tp",), CONTEXT: ("cp", "sp"), EXPERT: ("ep",)}
# Only FSDP reads them; the file to start from
_OF_FSDP = {
    "dp_replicate_size": "fsdp_tp",
    "dp_shard_size": "fsdp_tp",
    "sp_size": "fsdp_ulysses",
    "cp_size": "fsdp_ulysses",
    "ep_size": "fsdp_ep",
}
_SHARDED_ONCE = "remove it, so that all other processes are shards"
_ONE_OF_TWO = f"together with {_BLOCK}_ep_size it {EXPERT.untested}"
# Under a mode, keys that nothing was compared with: the reason, and what to do
_CONFLICTS: dict[Mode, dict[str, tuple[str, str]]] = {
    TENSOR: {"dp_replicate_size": (f"a model in several replicas {TENSOR.untested}", _SHARDED_ONCE)},
    CONTEXT: {
        "dp_replicate_size": (f"it {CONTEXT.untested}", _SHARDED_ONCE),
        _CUTS_SEQUENCE: (f"a sequence that is split in two ways {CONTEXT.untested}", "set it to false"),
    },
    EXPERT: dict.fromkeys(
        ("dp_replicate_size", "cp_size", "sp_size", _CUTS_SEQUENCE), (_ONE_OF_TWO, "remove one of the two")
    ),
    TORCH_PIPELINE: {
        **dict.fromkeys(
            ("dp_replicate_size", "dp_shard_size"),
            (f"it {TORCH_PIPELINE.untested}", "remove it, since shards take all other processes"),
        ),
        **dict.fromkeys(("cp_size", "sp_size", "ep_size"), (f"it {TORCH_PIPELINE.untested}", "remove it")),
        _CUTS_SEQUENCE: (
            f"stages would pass on parts of the sequence, which {TORCH_PIPELINE.untested}",
            "set it to false",
        ),
    },
}
_FSDP_IN_STAGES = ("fsdp_version", "fsdp_cpu_ram_efficient_loading")
_CUT = ("GPipe", "1F1B", "Interleaved1F1B")  # with tensor parallelism


def check_parallelism(document: Document) -> None:
    """Add the problems of an Accelerate YAML with parallel sizes, or with a block that its type cannot use."""
    kind, block = document.get("distributed_type"), document.get(_BLOCK)
    if "distributed_type" not in document.content:
        document.problem(("distributed_type",), "missing; set it to NO, MULTI_GPU, FSDP or DEEPSPEED")
        return
    for name, needed in _BLOCKS.items():
        if document.get(name) and kind not in needed:
            place = document.place(("distributed_type",))
            text = f"{' and '.join(needed)} alone read this block, but distributed_type is {kind} ({place})"
            fix = "remove the block, or change distributed_type"
            if name == _BLOCK and kind == "DEEPSPEED":
                fix = "use one of configs/fsdp_*.yaml, or remove the block"
            document.problem((name,), f"{text}; {fix}")
    values = {key.removeprefix(f"{_BLOCK}_"): value for key, value in block.items()} if isinstance(block, dict) else {}
    sizes = {name: size for name in _DIMENSIONS if isinstance(size := values.get(f"{name}_size"), int) and size > 1}
    _unread(document, values, sizes)
    modes = [mode for mode, names in _OF_MODES.items() if kind == "FSDP" and sizes.keys() & set(names)]
    if modes and document.get("fsdp_config", "fsdp_offload_params") is True:
        text = f"found true, but offload {modes[0].untested}; set it to false"
        document.problem(("fsdp_config", "fsdp_offload_params"), text)
    if values.get("pp_size") is not None or values.get("pp_schedule") is not None:
        modes.append(TORCH_PIPELINE)
        _schedule(document, values)
    for mode in modes:
        for key, (why, fix) in _CONFLICTS[mode].items():
            is_used = kind == "FSDP" and key.removesuffix("_size") in sizes
            if values.get(key) is True if key == _CUTS_SEQUENCE else is_used:
                text = f"found {describe(values[key])}, but {why}; {fix}"
                document.problem((_BLOCK, f"{_BLOCK}_{key}"), text)


def _unread(document: Document, values: dict[str, Any], sizes: dict[str, int]) -> None:
    """Add a problem for each key that the file's type, or its other sizes, would not read."""
    kind, texts = document.get("distributed_type"), {}
    if kind == "MULTI_GPU":
        place = document.place(("distributed_type",))
        text = f"only FSDP uses it, but distributed_type is {kind} ({place}); remove it, or start from configs/"
        texts = {key: f"{text}{file}.yaml" for key, file in _OF_FSDP.items() if values.get(key) is not None}
    if values.get(_CUTS_SEQUENCE) is True and "tp" not in sizes:
        text = "found true, but only tensor parallelism uses it"
        texts[_CUTS_SEQUENCE] = f"{text}; remove it, or set {_BLOCK}_tp_size"
    if (comm := values.get("cp_comm_strategy")) is not None and "cp" not in sizes:
        text = f"found {comm}, but it is read only where {_BLOCK}_cp_size is above 1"
        texts["cp_comm_strategy"] = f"{text}; set that size, or remove this key"
    if kind == "FSDP" and "cp" in sizes and "sp" in sizes:
        text = f"found {sizes['cp']}, but {_BLOCK}_sp_size is {sizes['sp']} and a sequence can be split only once"
        texts["cp_size"] = f"{text}; remove one of them"
    for key, text in texts.items():
        document.problem((_BLOCK, f"{_BLOCK}_{key}"), text)


def _schedule(document: Document, values: dict[str, Any]) -> None:
    """Check that size and schedule are given together, for a type and with sizes that have been compared."""
    kind, size, schedule = document.get("distributed_type"), values.get("pp_size"), values.get("pp_schedule")
    size_key, schedule_key = f"{_BLOCK}_pp_size", f"{_BLOCK}_pp_schedule"
    if size is None:
        text = f"missing, but {schedule_key} is {schedule}; set the number of pipeline ranks"
        document.problem((_BLOCK, size_key), text)
    elif schedule is None:
        text = f"missing, but {size_key} is {size}; set it to one of {', '.join(SCHEDULES)}"
        document.problem((_BLOCK, schedule_key), text)
    if kind not in ("MULTI_GPU", "FSDP"):
        text = f"found {size}, but schedules run with distributed_type MULTI_GPU or FSDP, and it is {kind}"
        document.problem((_BLOCK, size_key), f"{text}; start from configs/pipeline_1f1b.yaml")
    cut = values.get("tp_size")
    if cut not in (None, 1) and schedule in SCHEDULES and schedule not in _CUT:
        text = (
            f"found {schedule}, but with tensor-parallel stages ({_BLOCK}_tp_size: {cut}) it {TORCH_PIPELINE.untested}"
        )
        document.problem((_BLOCK, schedule_key), f"{text}; use {' or '.join(_CUT)}")
    block = document.get("fsdp_config")
    for key in block if kind == "FSDP" and isinstance(block, dict) else ():
        if key not in _FSDP_IN_STAGES:
            text = "FSDP inside pipeline stages gathers a layer once per step, and another setting"
            document.problem(("fsdp_config", key), f"{text} {TORCH_PIPELINE.untested}; remove it")
