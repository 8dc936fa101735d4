"""Checks the number of processes against the strategy's files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from samecurve.config.documents import COMMAND_LINE, ENVIRONMENT, ConfigProblem, Document, KeyPath

if TYPE_CHECKING:
    from samecurve.strategy.launchers import Launch
    from samecurve.strategy.plan import Files, Strategy

_REPLICAS = ("parallelism_config", "parallelism_config_dp_replicate_size")
_SHARDS = ("parallelism_config", "parallelism_config_dp_shard_size")
_EXPERTS = ("parallelism_config", "parallelism_config_ep_size")
_TENSOR = ("parallelism_config", "parallelism_config_tp_size")
_SECONDARY = ("zero_optimization", "zero_hpz_partition_size")
_STAGES = ("pipeline", "stages")
_PIPELINE = ("parallelism_config", "parallelism_config_pp_size")


def world_problems(files: Files, strategy: Strategy, launch: Launch) -> Iterator[ConfigProblem]:
    """Yield all problems of the number of processes."""
    wrong = list(_wrong_count(files.accelerate, strategy, launch))
    yield from wrong
    if wrong:  # the arrangement of the processes can be judged only once their number is right
        return
    world, stages, cut = strategy.world_size, strategy.dims.pp, strategy.dims.tp
    if strategy.torch_schedule:
        with_fsdp = files.accelerate.get("distributed_type") == "FSDP"  # without it there are no replicas of stages
        text = f"found {cut}, but {_processes(world)} cannot form {stages} stages of"
        if world % stages:
            text = f"found {stages}, but {_processes(world)} cannot form pipelines of {stages}"
            yield _at(files.accelerate, _PIPELINE, f"{text}; start a multiple of {stages}{_or_a_divisor(world)}")
        elif cut > 1 and with_fsdp and world % (stages * cut):
            yield _at(files.accelerate, _TENSOR, f"{text} a multiple of {cut}; start a multiple of {stages * cut}")
        elif cut > 1 and not with_fsdp and world != stages * cut:
            fix = f"start {stages * cut}, or use configs/pp_fsdp_tp.yaml, which shards over the others"
            yield _at(files.accelerate, _TENSOR, f"{text} {cut}; {fix}")
        return
    if world % stages:
        text = f"{_processes(world)} cannot be divided into {stages} stages; start a multiple of {stages}"
        yield _at(files.deepspeed, _STAGES, text)
    yield from _wrong_mesh(files.accelerate, strategy)
    secondary = strategy.secondary_partition
    if secondary > 1 and (world % secondary or world == secondary):
        text = f"found {secondary}, but {_processes(world)} cannot form several groups of {secondary}"
        fix = f"start a multiple of {secondary} from {2 * secondary} on, or use configs/zero3.yaml"
        yield _at(files.deepspeed, _SECONDARY, f"{text}, each with a second copy of the weights; {fix}")


def _processes(world: int) -> str:
    return "1 process" if world == 1 else f"{world} processes"


def _or_a_divisor(world: int) -> str:
    """The sizes that divide the number of processes, as another way out; "" for one process, which has none."""
    sizes = [str(size) for size in range(2, world + 1) if world % size == 0]
    return f", or set it to {' or '.join(sizes)}" if sizes else ""


def _at(document: Document, path: KeyPath, text: str) -> ConfigProblem:
    return ConfigProblem(document.place(path), ".".join(path), text, topology=True)


def _world_size(launch: Launch, text: str) -> ConfigProblem:
    where = (COMMAND_LINE, "--num_processes") if launch.launcher == "train.py" else (ENVIRONMENT, "WORLD_SIZE")
    return ConfigProblem(*where, text, topology=True)


def _wrong_count(accelerate: Document, strategy: Strategy, launch: Launch) -> Iterator[ConfigProblem]:
    """A number given to the launcher overrides the file's `num_processes`, which is accelerate launch's default.

    Where the file has several machines, only accelerate launch's own flag does: the others may have started too few.
    """
    world, said, machines = launch.world_size, accelerate.get("num_processes"), accelerate.get("num_machines")
    given = (launch.flags or {}).get("num_processes", "")
    if given.isdecimal() and int(given) != world:
        text = f"found {world}, but accelerate launch was given --num_processes {given}"
        yield _world_size(launch, f"{text}; its distributed_type starts only one process; choose another strategy")
    many_machines = isinstance(machines, int) and machines > 1
    if isinstance(said, int) and said != world and not given and (many_machines or not launch.counted):
        place = accelerate.place(("num_processes",))
        difference, fix = f"found {world}, but {place} says num_processes: {said}", "make the two equal"
        if launch.launcher == "python" and world == 1:
            difference = f"plain python starts one process, but {place} says num_processes: {said}"
            fix = f"start it with accelerate launch --config_file {accelerate.name}, or add --num_processes {said}"
        elif many_machines:
            fix = f"start {said} processes in total on the {machines} machines, or correct the file"
        yield _world_size(launch, f"{difference}; {fix}")

    if world == 1 or strategy.distributed:
        return
    config_unseen = launch.launcher == "accelerate" and launch.flags is None  # then the missing strategy is reported
    if strategy.path is None and not config_unseen:
        text = f"found {world}, but without a strategy each process would train alone; pass --strategy configs/ddp.yaml"
        yield _world_size(launch, text)
    elif accelerate.get("distributed_type") == "NO":
        place = accelerate.place(("distributed_type",))
        text = f"found {world}, but {place} says distributed_type: NO, which is one process; use configs/ddp.yaml"
        yield _world_size(launch, text)


def _wrong_mesh(accelerate: Document, strategy: Strategy) -> Iterator[ConfigProblem]:
    """Accelerate refuses replicas of one shard each, but only after the model has been loaded."""
    world, replicas, shards = strategy.world_size, strategy.replicate_size, accelerate.get(*_SHARDS)
    cut, parts, experts = strategy.dims.tp, strategy.dims.cp, strategy.dims.ep
    alone = cut > 1 and strategy.sharding == "none"
    if world % experts:
        text = f"found {experts}, but {_processes(world)} cannot form groups of {experts} that share the experts"
        yield _at(accelerate, _EXPERTS, f"{text}; start a multiple of {experts} processes{_or_a_divisor(world)}")
    elif (shared := max(experts, parts)) > 1 and cut > 1 and world % (shared * cut):  # never both
        text = f"found {shared}, but {_processes(world)} cannot form {shared} groups of {cut} tensor-parallel processes"
        key = _EXPERTS if experts > 1 else tuple(strategy.context_key.split("."))
        yield _at(accelerate, key, f"{text}; start a multiple of {shared * cut}")
    elif world % parts:
        text = f"found {parts}, but {_processes(world)} cannot form groups of {parts}"
        fix = f"start a multiple of {parts} processes{_or_a_divisor(world)}"
        yield _at(accelerate, tuple(strategy.context_key.split(".")), f"{text}; {fix}")
    elif world % cut or (alone and world != cut):
        if alone:
            text = f"found {cut}, but without FSDP a single group has all {_processes(world)}"
            fix = f"start {cut} processes, or set it to {world}"
            fix += ", or use configs/fsdp_tp.yaml, which shards over the others"
        else:
            text = f"found {cut}, but {_processes(world)} cannot form groups of {cut}"
            fix = f"start a multiple of {cut} processes{_or_a_divisor(world)}"
        yield _at(accelerate, _TENSOR, f"{text}; {fix}")
    elif replicas > 1 and (world % replicas or world // replicas < 2):
        text = f"found {replicas}, but {_processes(world)} cannot form {replicas} replicas of 2 or more shards"
        text += f"; start {2 * replicas} processes or a larger multiple of {replicas}, or use fsdp"
        yield _at(accelerate, _REPLICAS, text)
    elif isinstance(shards, int) and shards * replicas * cut * parts != world:
        made = world // (replicas * cut * parts)
        text = f"found {shards}, but {world} processes in {replicas} replicas make {made} shards"
        text += f" of {cut} tensor-parallel processes each" if cut > 1 else ""
        text += f" of {parts} context-parallel processes each" if parts > 1 else ""
        yield _at(accelerate, _SHARDS, f"{text}; remove it, since it is derived")
