"""What the strategy's files must not say, alone and together with the recipe. Every finding is a problem of a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..documents import COMMAND_LINE, ENVIRONMENT, Document, KeyPath, Problem, describe, suggest
from ..recipe import Source, hidden_layers
from .keys import ACCELERATE, Kind, Owned, Refused, Table
from .keys_deepspeed import DEEPSPEED, STAGES

if TYPE_CHECKING:
    from .launchers import Launch
    from .resolve import Files, Strategy


def check(source: Source, files: Files, strategy: Strategy, launch: Launch) -> None:
    """Add the problems of both files, of the number of processes and of the batch to their documents."""
    if files.accelerate.content:
        _walk(files.accelerate, ACCELERATE, source)
        _accelerate(files.accelerate)
    if files.deepspeed.content:
        _walk(files.deepspeed, DEEPSPEED, source)
        _deepspeed(files.deepspeed, strategy)
        if strategy.family == "pipeline":
            _pipeline(files.deepspeed, strategy, source)
    for document in (files.accelerate, files.deepspeed):
        if document.content:
            _name(document, strategy)
    world_problems = list(_world(files, strategy, launch))
    source.document.problems += world_problems
    if not world_problems and not launch.problems:
        _batch(source, strategy)


def _walk(document: Document, table: Table, source: Source, path: KeyPath = ()) -> None:
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
            text = _complaint(rule, value, source)
            if text:
                document.problem(here, text)


def _complaint(rule: Any, value: Any, source: Source) -> str | None:
    if isinstance(rule, dict):
        return None if value is None else f"found {describe(value)}, a block of keys is needed"
    if isinstance(rule, Kind):
        return None if rule.accepts(value) else f"found {describe(value)}, {rule.needed}{_quotes_hint(value)}"
    if isinstance(rule, Owned):
        if rule.auto and value == "auto":
            return None
        fix = 'write "auto" or remove it' if rule.auto else "remove it"
        return f"found {describe(value)}, but the recipe owns it: {source.cite(rule.by)}; {fix}"
    return None if _harmless(rule, value) else f"found {describe(value)}: {rule.reason}"


def _harmless(rule: Refused, value: Any) -> bool:
    return any(value == allowed and type(value) is type(allowed) for allowed in rule.harmless)


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
        if not isinstance(rule, Refused):
            yield (*path, key)
        if isinstance(rule, dict):
            yield from _honoured(rule, (*path, key))


_BLOCKS = {"fsdp_config": "FSDP", "parallelism_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
_DEMANDED = {
    "FSDP": (
        ("fsdp_config", "fsdp_version", "accelerate's default is 1; add fsdp_version: 2"),
        ("fsdp_config", "fsdp_cpu_ram_efficient_loading", "accelerate's default is true; add it with false"),
    ),
    "DEEPSPEED": (("deepspeed_config", "deepspeed_config_file", "add the path of the DeepSpeed JSON"),),
}


def _accelerate(document: Document) -> None:
    kind = document.get("distributed_type")
    if "distributed_type" not in document.content:
        document.problem(("distributed_type",), "missing; add NO (in quotes), MULTI_GPU, FSDP or DEEPSPEED")
        return
    for block, needed in _BLOCKS.items():
        if document.get(block) and kind != needed:
            place = document.place(("distributed_type",))
            text = f"only {needed} reads it, but distributed_type is {kind} ({place}); keep one of the two"
            document.problem((block,), text)
    for block, key, advice in _DEMANDED.get(kind if isinstance(kind, str) else "", ()):
        if document.get(block, key) is None:
            document.problem((block, key), f"missing; {advice}")


def _deepspeed(document: Document, strategy: Strategy) -> None:
    zero = document.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage")
    if strategy.family == "zero" and stage is None:
        document.problem(("zero_optimization", "stage"), "missing; add 1, 2 or 3")
    elif strategy.family == "zero" and stage == 0 and not isinstance(stage, bool):
        text = "found 0, which shards nothing; choose configs/ddp.yaml, or a stage from 1 to 3"
        document.problem(("zero_optimization", "stage"), text)
    if strategy.zero_stage in (1, 2, 3):
        for key in zero.keys() & STAGES.keys():
            if strategy.zero_stage not in STAGES[key] and not _switched_off(zero[key]):
                stages = " and ".join(str(number) for number in STAGES[key])
                text = f"only stage {stages} reads it, but zero_optimization.stage is {strategy.zero_stage}; remove it"
                document.problem(("zero_optimization", key), text)
    _offload(document, zero, strategy)
    if _on(document, "bf16") and _on(document, "fp16"):
        document.problem(
            ("fp16", "enabled"), f"bf16 is on too ({document.place(('bf16', 'enabled'))}); one at most can be"
        )
    if strategy.family == "zero" and document.get("activation_checkpointing"):
        text = "only a pipeline reads it; recomputation is the recipe's memory.activation_checkpointing; remove it"
        document.problem(("activation_checkpointing",), text)


def _on(document: Document, block: str) -> bool:
    return document.get(block, "enabled") is True


def _switched_off(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") == "none" or value == 1


def _offload(document: Document, zero: dict, strategy: Strategy) -> None:
    for part in ("offload_optimizer", "offload_param"):
        block = zero.get(part)
        device = block.get("device") if isinstance(block, dict) else None
        path = ("zero_optimization", part, "device")
        if device == "nvme" and not block.get("nvme_path"):
            document.problem((*path[:2], "nvme_path"), "missing; add a folder on a local disk")
        if device == "nvme" and part == "offload_optimizer" and strategy.zero_stage in (1, 2):
            text = f'found "nvme", but stage {strategy.zero_stage} quietly offloads to the CPU instead; write "cpu" or use stage 3'
            document.problem(path, text)
        if device in ("cpu", "nvme") and strategy.family == "pipeline":
            document.problem(path, f"found {describe(device)}, but a pipeline cannot offload here; remove {part}")
    ratio = document.get("zero_optimization", "offload_optimizer", "ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and strategy.zero_stage in (1, 2):
        text = f"found {ratio}, but only stage 3 offloads a part, and zero_optimization.stage is {strategy.zero_stage}"
        document.problem(("zero_optimization", "offload_optimizer", "ratio"), text)


def _pipeline(document: Document, strategy: Strategy, source: Source) -> None:
    if strategy.zero_stage in (2, 3):
        text = f"found {strategy.zero_stage}, but a pipeline works with stage 0 or 1 only; set it to 1"
        document.problem(("zero_optimization", "stage"), text)
    stages, layers = document.get("pipeline", "stages"), hidden_layers(source)
    if stages is None:
        document.problem(("pipeline", "stages"), "missing; add the number of stages that the layers are cut into")
    elif layers is not None and strategy.pipeline_stages > layers:
        text = f"found {stages}, but the recipe's model has {layers} layers; a stage needs one at least"
        document.problem(("pipeline", "stages"), text)
    zero = document.get("zero_optimization")
    for key, value in zero.items() if isinstance(zero, dict) else ():
        if value == "auto":
            document.problem(
                ("zero_optimization", key), 'found "auto", which nobody fills in for a pipeline; write a number'
            )
    interval = document.get("pipeline", "activation_checkpoint_interval")
    if isinstance(interval, int) and interval > 0:
        try:
            checkpointing = source.value("memory.activation_checkpointing")
        except KeyError:
            return
        if checkpointing == "none":
            text = f"found {interval}, but the recipe says {source.cite('memory.activation_checkpointing')}; make them agree"
            document.problem(("pipeline", "activation_checkpoint_interval"), text)


def _name(document: Document, strategy: Strategy) -> None:
    """A file called zero2_offload has to be that; other names are free."""
    stem = Path(document.name).stem
    known = stem.startswith(("zero1", "zero2", "zero3", "fsdp", "hsdp", "pipeline", "ddp", "single"))
    if not known:
        return
    is_json = document.name.endswith(".json")
    where: KeyPath = ("zero_optimization", "stage") if is_json else ()
    if stem.startswith("zero") and strategy.zero_stage and strategy.zero_stage != int(stem[4]):
        document.problem(
            where, f"the file is called {stem}, but the ZeRO stage is {strategy.zero_stage}; rename or change it"
        )
    families = {"fsdp": "fsdp", "hsdp": "fsdp", "pipe": "pipeline", "ddp": "ddp", "sing": "single", "zero": "zero"}
    claimed = next(family for prefix, family in families.items() if stem.startswith(prefix))
    if strategy.family != claimed:
        document.problem((), f"the file is called {stem}, but what it holds is {strategy.family}; rename or change it")
        return
    if claimed == "fsdp" and stem.startswith("hsdp") != (strategy.replicate_size > 1):
        text = f"the file is called {stem}, but replicates by {strategy.replicate_size}; rename or change it"
        document.problem(("parallelism_config",), text)
    _offload_name(document, stem, strategy)


def _offload_name(document: Document, stem: str, strategy: Strategy) -> None:
    nvme = any(target.endswith("nvme") for target in strategy.offload)
    promised = "_nvme" in stem or "_offload" in stem
    is_json = document.name.endswith(".json")
    path: KeyPath = ("zero_optimization",) if is_json else () if strategy.deepspeed else ("fsdp_config",)
    said = ", ".join(strategy.offload) or "nothing"
    if promised != bool(strategy.offload) or ("_nvme" in stem) != nvme:
        document.problem(path, f"the file is called {stem}, but {said} is offloaded; rename or change it")


def _world(files: Files, strategy: Strategy, launch: Launch) -> Iterator[Problem]:
    """Everything about the number of processes."""
    yield from _count_problems(files, launch)
    world = launch.world_size
    if world > 1 and strategy.path is None and strategy.deepspeed_path is None:
        text = f"found {world}, but no strategy is chosen, so each would train alone; pass --strategy configs/ddp.yaml"
        yield Problem(ENVIRONMENT, "WORLD_SIZE", text, topology=True)
    elif world > 1 and strategy.family == "single" and files.accelerate.get("distributed_type") == "NO":
        place = files.accelerate.place(("distributed_type",))
        text = f"found {world}, but {place} says distributed_type: NO, which is one process; choose configs/ddp.yaml"
        yield Problem(ENVIRONMENT, "WORLD_SIZE", text, topology=True)
    if strategy.family == "pipeline" and world % strategy.pipeline_stages:
        place = files.deepspeed.place(("pipeline", "stages"))
        text = f"{world} processes do not divide into {strategy.pipeline_stages} stages; start a multiple of them"
        yield Problem(place, "pipeline.stages", text, topology=True)
    yield from _mesh_problems(files, strategy)


def _count_problems(files: Files, launch: Launch) -> Iterator[Problem]:
    said, world, name = files.accelerate.get("num_processes"), launch.world_size, files.accelerate.name
    machines = files.accelerate.get("num_machines")
    many_machines = isinstance(machines, int) and machines > 1
    if not isinstance(said, int) or said == world or (launch.counted and not many_machines):
        return
    place = files.accelerate.place(("num_processes",))
    found = f"found {world}, but {place} says num_processes: {said}"
    if launch.launcher == "python" and world == 1:
        found = f"plain python starts one process, but {place} says num_processes: {said}"
        fix = f"start it with accelerate launch --config_file {name}, or with torchrun --nproc_per_node {said}"
    elif launch.launcher == "accelerate":
        fix = f"accelerate launch did not start what its file says; pass --num_processes {said}, or correct the file"
    else:
        fix = f"start {said} processes, or correct the file" if many_machines else "make the two equal"
    yield Problem(ENVIRONMENT, "WORLD_SIZE", f"{found}; {fix}", topology=True)


def _mesh_problems(files: Files, strategy: Strategy) -> Iterator[Problem]:
    world, replicas = strategy.world_size, strategy.replicate_size
    block = "parallelism_config"
    key = f"{block}_dp_replicate_size"
    place, shard = files.accelerate.place((block, key)), files.accelerate.get(block, f"{block}_dp_shard_size")
    if replicas > 1 and (world % replicas or world // replicas < 2):
        text = f"found {replicas}, but {world} processes are not {replicas} replicas of at least 2 shards; start more, or use fsdp"
        yield Problem(place, f"{block}.{key}", text, topology=True)
    elif isinstance(shard, int) and shard * replicas != world:
        text = f"found {shard}, but {world} processes in {replicas} replicas make {world // replicas}; remove it, it is derived"
        yield Problem(
            files.accelerate.place((block, f"{block}_dp_shard_size")), f"{block}.{block}_dp_shard_size", text, True
        )
    secondary = files.deepspeed.get("zero_optimization", "zero_hpz_partition_size")
    if isinstance(secondary, int) and secondary > 1 and strategy.zero_stage == 3 and world % secondary:
        text = f"found {secondary}, which does not divide the {world} processes"
        path = ("zero_optimization", "zero_hpz_partition_size")
        yield Problem(files.deepspeed.place(path), ".".join(path), text, topology=True)


def _batch(source: Source, strategy: Strategy) -> None:
    try:
        total, micro = source.value("batch.global_batch_size"), source.value("batch.micro_batch_size")
    except KeyError:
        return
    ranks = strategy.data_parallel_size
    if total % (micro * ranks) == 0:
        return
    below = total // (micro * ranks) * micro * ranks
    near = " or ".join(str(size) for size in (below, below + micro * ranks) if size)
    fitting = [size for size in range(1, total // ranks + 1) if total % (size * ranks) == 0]
    fitting = sorted(sorted(fitting, key=lambda size: abs(size - micro))[:3])
    text = (
        f"found {total}, which micro_batch_size {micro} x {ranks} data-parallel ranks does not divide; "
        f"nearest global_batch_size: {near}; nearest micro_batch_size: {', '.join(map(str, fitting)) or 'none'}"
    )
    source.document.problem(("batch", "global_batch_size"), text)
