"""Checks the strategy's files, alone and together with the recipe. Findings become problems of the documents."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import Document, KeyPath, describe, suggest
from samecurve.config.rules_profile import check_ranks
from samecurve.config.section import LARGEST_INTEGER
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.specs.data_names import WIDTH_MULTIPLE
from samecurve.strategy import capabilities, validate_deepspeed
from samecurve.strategy.accelerate_keys import ACCELERATE, RecipeOwned, Rejected, Table, ValueRule
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.pipeline_schedules import micro_batch_rule
from samecurve.strategy.validate_parallelism import check_parallelism
from samecurve.strategy.world_size import world_problems

if TYPE_CHECKING:
    from samecurve.strategy.launchers import Launch
    from samecurve.strategy.plan import Files, Strategy

Finding = tuple[str, str]
Value = Callable[[str], Any]
_SEQUENCE = "parallelism_config_tp_sequence_parallel"
AUTO_COMPILE_STEPS = 1000  # from which on `compile: auto` compiles (assumed: fewer seldom repay a minute of compiling)


def check_strategy(source: RecipeSource, files: Files, strategy: Strategy, launch: Launch) -> None:
    """Add the problems of both strategy files, of the world size and of the batch to their documents.

    Args:
        source: the recipe as written; gets the problems of its own keys and of the world size.
        files: the strategy's documents; get the problems of their own keys.
        strategy: what the files describe, from `resolve.describe_strategy`.
        launch: the launcher and its number of processes.
    """
    if files.accelerate.content:
        _walk(files.accelerate, ACCELERATE, source)
        _accelerate(files.accelerate)
    if files.deepspeed.content:
        _walk(files.deepspeed, DEEPSPEED, source)
        validate_deepspeed.check_deepspeed(files.deepspeed, strategy, source)
    _names(files, strategy)
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


def choose_compile(strategy: Strategy, steps_left: int) -> tuple[str, str]:
    """Choose what `compile: auto` means: regional where the strategy allows it and many steps are left.

    Args:
        steps_left: number of steps until the end of the run.

    Returns:
        The value of `compile`, and the reason.
    """
    if any(capabilities.problems({"compile": "regional"}.__getitem__, strategy, "compile")):
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


def _walk(document: Document, table: Table, source: RecipeSource, path: KeyPath = ()) -> None:
    """Compare every key with the table, at every level."""
    block = document.get(*path)
    for key, value in block.items():
        here, rule = (*path, key), table.get(key)
        if rule is None:
            whole = ACCELERATE if table is ACCELERATE or path and path[0] in ACCELERATE else DEEPSPEED
            document.problem(here, "unknown key" + suggest(here, _honoured(whole)))
        elif isinstance(rule, dict) and isinstance(value, dict):
            _walk(document, rule, source, here)
        else:
            text = complaint(rule, value, source)
            if text:
                document.problem(here, text)


def complaint(rule: Any, value: Any, source: RecipeSource) -> str | None:
    """Say what is wrong with a key's value by its rule from a table of keys; None if nothing is."""
    if isinstance(rule, dict):
        return None if value is None else f"found {describe(value)}, expected a block of keys"
    if isinstance(rule, ValueRule):
        if not rule.accepts(value):
            return f"found {describe(value)}, expected {rule.expected}{_quotes_hint(value)}"
        too_large = isinstance(value, (int, float)) and abs(value) > LARGEST_INTEGER
        return f"found {describe(value)}, expected a number of at most {LARGEST_INTEGER}" if too_large else None
    if isinstance(rule, RecipeOwned):
        if rule.auto and value == "auto":
            return None
        fix = 'write "auto" or remove it' if rule.auto else "remove it"
        return f"found {describe(value)}, but the recipe sets this: {source.cite(rule.by)}; {fix}"
    # by type, too: for Python 0 == False and 1 == True
    harmless = any(value == allowed and type(value) is type(allowed) for allowed in rule.harmless)
    return None if harmless else f"found {describe(value)}, but {rule.reason}"


def _quotes_hint(value: Any) -> str:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    return ""


def _honoured(table: Table, path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, rule in table.items():
        if not isinstance(rule, Rejected):  # what is refused is not suggested
            yield (*path, key)
        if isinstance(rule, dict):
            yield from _honoured(rule, (*path, key))


_BLOCKS = {"fsdp_config": ("FSDP",), "parallelism_config": ("FSDP", "MULTI_GPU"), "deepspeed_config": ("DEEPSPEED",)}
_DEMANDED = {
    "FSDP": (
        ("fsdp_config", "fsdp_version", "missing, and Accelerate's default is 1; add fsdp_version: 2"),
        (
            "fsdp_config",
            "fsdp_cpu_ram_efficient_loading",
            "missing, and Accelerate's default is true; add it with false",
        ),
    ),
    "DEEPSPEED": (("deepspeed_config", "deepspeed_config_file", "missing; set it to the path of the DeepSpeed JSON"),),
}


def _accelerate(document: Document) -> None:
    kind = document.get("distributed_type")
    if "distributed_type" not in document.content:
        document.problem(("distributed_type",), 'missing; set it to "NO" (in quotes), MULTI_GPU, FSDP or DEEPSPEED')
        return
    for block, needed in _BLOCKS.items():
        if document.get(block) and kind not in needed:
            place = document.place(("distributed_type",))
            text = f"only {' and '.join(needed)} use this block, but distributed_type is {kind} ({place})"
            document.problem((block,), f"{text}; remove the block, or change distributed_type")
    check_parallelism(document)
    if document.get("fsdp_config", "fsdp_forward_prefetch") is True:
        policy = document.get("fsdp_config", "fsdp_auto_wrap_policy") or "absent"
        if policy != "TRANSFORMER_BASED_WRAP":
            text = "found true, but only the layers of TRANSFORMER_BASED_WRAP run in a known order and "
            text += f"fsdp_auto_wrap_policy is {policy}; set it to false"
            document.problem(("fsdp_config", "fsdp_forward_prefetch"), text)
    for block, key, advice in _DEMANDED.get(kind if isinstance(kind, str) else "", ()):
        if document.get(block, key) is None:
            document.problem((block, key), advice)


_NAMED = re.compile(r"(zero[123]|fsdp|hsdp|ddp|tp|pipeline|pp|single)(_|$)")


def _names(files: Files, strategy: Strategy) -> None:
    """Check that the files' names match their content.

    Skipped where the strategy itself is invalid. A JSON is checked in place of a YAML of the same name.
    """
    kind = files.accelerate.get("distributed_type")
    json_stem = Path(files.deepspeed.name).stem
    if kind == "DEEPSPEED" and not (files.deepspeed.content and json_stem != Path(files.accelerate.name).stem):
        kind = None
    if ACCELERATE["distributed_type"].accepts(kind):
        _name(files.accelerate, strategy)
    if strategy.zero_stage or strategy.schedule == "deepspeed":
        _name(files.deepspeed, strategy)


def _name(document: Document, strategy: Strategy) -> None:
    """A file called zero2_offload must configure that; names that claim no strategy are free."""
    stem = Path(document.name).stem
    claimed = _NAMED.match(stem)
    if not claimed:
        return
    truth = {"zero": f"zero{strategy.zero_stage}", "fsdp": "hsdp" if strategy.replicate_size > 1 else "fsdp"}
    truth["schedule"] = "pp" if claimed[1] == "pp" else "pipeline"
    is_json = document.name.endswith(".json")
    kind_key: KeyPath = ("zero_optimization", "stage") if is_json else ("distributed_type",)
    offload_key: KeyPath = ("zero_optimization",) if is_json else ("fsdp_config",)
    # what the name of such a YAML promises is in its JSON
    if strategy.deepspeed_path and not is_json:
        kind_key = offload_key = ("deepspeed_config", "deepspeed_config_file")
    it_is = truth.get(strategy.family, strategy.family)
    if claimed[1] != it_is:
        text = f"the file is called {stem}, but it configures {it_is}; rename the file or change what it configures"
        document.problem(kind_key, text)
    by_heads = strategy.context_parallel == "ulysses"
    sizes = {
        "tp": ("tensor-parallel", strategy.dims.tp),
        "ulysses": ("Ulysses", strategy.dims.cp if by_heads else 1),
        "cp": ("context-parallel", 1 if by_heads else strategy.dims.cp),
        "ep": ("expert-parallel", strategy.dims.ep),
        "hpz": ("secondary partition's", strategy.secondary_partition),
    }
    for word, (what, size) in sizes.items():
        if claimed[1] == it_is and (word in stem.split("_")) != (size > 1):
            text = f"the file is called {stem}, but its {what} size is {size}; rename the file or change that size"
            document.problem(kind_key, text)
    to_nvme = any(target.endswith("nvme") for target in strategy.offload)
    promised = "_nvme" in stem or "_offload" in stem
    if promised != bool(strategy.offload) or ("_nvme" in stem) != to_nvme:
        offloaded = " and ".join(strategy.offload) or "nothing"
        text = f"the file is called {stem}, but it offloads {offloaded}; rename the file or change what it offloads"
        document.problem(offload_key, text)
