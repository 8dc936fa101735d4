"""Start of a training session: build_model, find_checkpoint, build_engine, restore, open_run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.accelerator.trackers import Trackers, failure
from samecurve.checkpoint import commit
from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.checkpoint.manifest import list_checkpoints
from samecurve.checkpoint.mirror import Mirror
from samecurve.checkpoint.resume import comparable, read_state, without_effect
from samecurve.data.batches import StepBatches
from samecurve.data.row_checks import write_bad_rows
from samecurve.distributed.control_group import ControlGroup, StopVote
from samecurve.engines import factory
from samecurve.errors import ConfigurationError, NothingToDo, StorageError
from samecurve.export.hf_export import ExportTarget
from samecurve.interfaces.task import InitialState
from samecurve.metrics.console import Progress
from samecurve.metrics.meter import Meter, WaitAdvice
from samecurve.models import fp8, liger, matmul_speed, routers, weights
from samecurve.models.attention import choice, cudnn
from samecurve.models.compilation import Recompilations
from samecurve.models.lora import is_adapted, trained_shapes
from samecurve.models.packed_rows import check_packing
from samecurve.optim.parameter_groups import describe_groups, roles_of
from samecurve.optim.schedule import learning_rate
from samecurve.run.metadata import RunFacts, resume_identity
from samecurve.specs.data_names import BAD_ROWS
from samecurve.specs.model_families import unproven_uses
from samecurve.specs.precision import COMPILED
from samecurve.storage import trusted_code
from samecurve.storage.atomic import json_values, known_cause
from samecurve.storage.filesystem import LocalFileSystem, next_free
from samecurve.storage.object_store import ObjectStore
from samecurve.strategy.launchers import is_restart
from samecurve.tasks import registry
from samecurve.tasks.task_skeleton import skeleton_of
from samecurve.training import room, settle
from samecurve.training.evaluator import EarlyStopping, Evaluation, due
from samecurve.training.gc_schedule import GarbageCollection
from samecurve.training.numerics_guard import Guard
from samecurve.training.session import Built, Context, Session

if TYPE_CHECKING:
    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task
    from samecurve.run.lifecycle import RunSupervisor
    from samecurve.run.run_directory import RunDirectory
    from samecurve.strategy.plan import Plan


def open_session(plan: Plan, accelerator: Accelerator, run: RunDirectory, watch: RunSupervisor) -> Session:
    """Start one execution of train.py, from the first step or from an earlier session's checkpoint. Collective.

    Raises:
        NothingToDo: the same command has already completed.
        DataError, ConfigurationError, CheckpointError, TopologyError, StorageError: see the steps.
    """
    recipe = plan.recipe
    progress = Progress(recipe.steps, recipe.logging.every_steps, enabled=accelerator.is_main_process)
    context = Context(plan, accelerator, run, watch, ControlGroup(), progress)  # all ranks have connected by now
    room.check_shared(context.world, run.path)
    context, built, checkpoints = prepare(context)
    engine = build_engine(context, built)
    start = restore(context, engine, checkpoints)
    start = make_up_evaluation(context, built, engine, checkpoints, start)
    return open_run(context, built, engine, checkpoints, start)


def prepare(context: Context) -> tuple[Context, Built, Checkpoints]:
    """Settle the recipe, load the rows, build the model on the meta device and find the checkpoint. Collective.

    Raises as `open_session`.
    """
    context = settle.settle_date(settle.settle_pooling(settle.settle_revision(context)))
    task = load_task(context)
    context = settle.settle_steps(context, task)
    built = build_model(context, task)
    # before the engine: a run that is complete or cannot resume must not load weights first
    checkpoints = find_checkpoint(context, built.identity)
    return settle.settle_compile(context, checkpoints), built, checkpoints


def load_task(context: Context) -> Task:
    """Load the task with its rows. Collective. Raises DataError: the data or the tokenizer cannot be used."""
    context.watch.phase("build")
    return registry.load_on_all_ranks(context.recipe, context.world, context.watch.local_progress)


def build_model(context: Context, task: Task) -> Built:
    """Build the model on the meta device, identically on every rank.

    Raises:
        ConfigurationError: the model does not support the recipe.
    """
    recipe = context.recipe
    skeleton = skeleton_of(recipe, task)
    uses = unproven_uses(skeleton)
    check_packing(skeleton.config, recipe.data.packing, recipe.batch.sequence_length, uses)
    liger.check_family(recipe.model.kernels, skeleton.config.model_type, uses)
    if recipe.model.trust_remote_code and context.world.is_main:
        try:
            for path in recipe.model_paths:
                trusted_code.remember(path, recipe.model.revision if path == recipe.model.path else None)
        except StorageError as error:
            context.progress.log(f"{error}; commands on this run's model will need {trusted_code.OPTION}")
    constants = dict(weights.constant_tensors(skeleton, recipe))
    return Built(task, skeleton, resume_identity(context.plan, skeleton, task, constants), constants)


def find_checkpoint(context: Context, identity: dict) -> Checkpoints:
    """Open the run's checkpoints and select the one to resume from, if any (`Checkpoints.resumed_from`).

    Raises:
        NothingToDo, ConfigurationError: see `check_work`; raised on all ranks.
        CheckpointError: no checkpoint can be used, or the run may not resume from it; raised on all ranks.
    """
    recipe, run, log = context.recipe, context.run, context.progress.log
    background = recipe.checkpoint.background
    if background is None:
        # a background save copies the state to host memory, where state offloaded to NVMe would not fit
        background = "optimizer:nvme" not in context.plan.strategy.offload
    checkpoints = Checkpoints(run, recipe, identity, context.world, log, context.watch.local_progress, background)
    checkpoint = checkpoints.find(context.plan.resume)
    if checkpoint is not None:
        # on rank 0, because another rank may have read status.json after rank 0 set it to running
        log(context.world.on_main(lambda: check_work(run, recipe, read_state(checkpoint), json_values(identity))))
    return checkpoints


def check_work(run: RunDirectory, recipe: Recipe, saved: dict, identity: dict) -> str:
    """Refuse a start that would train no step, unless its export is missing. For rank 0.

    Args:
        saved, identity: see `compatibility.refusals`.

    Returns:
        A line to print: see `rate_change`, or changed keys that have no effect on the missing export; "" otherwise.

    Raises:
        NothingToDo: the same command has already completed.
        ConfigurationError: keys have changed, which without a step would only change what the run says of itself.
    """
    early_stopping = EarlyStopping(recipe, comparable(saved, identity).get("stopping", {}))
    if saved["step"] < recipe.steps and not early_stopping.is_over:
        return rate_change(recipe, saved)
    where = f"nothing to do: {run.path} is at step {saved['step']} of {recipe.steps}"
    more = f"epochs={2 * recipe.epochs:g}" if recipe.epochs else f"steps={2 * recipe.steps}"
    if early_stopping.is_over:
        where, more = f"{where}: {early_stopping.describe()}", "evaluate.patience=null"
    ways = f"{more} goes on, output_dir={next_free(run.path)} starts another run, --fresh starts over"
    is_complete = run.is_done and (run.is_exported or not recipe.export.enabled)
    if changed := without_effect(saved, identity):
        count = "1 changed key has" if len(changed) == 1 else f"{len(changed)} changed keys have"
        text = f"{count} no effect: {', '.join(changed)}"
        if not is_complete:
            return f"only the export of {run.path} is missing; {text}"
        raise ConfigurationError(f"{where}; {text}; {ways}")
    if is_complete:
        raise NothingToDo(f"{where}{f', and its model is in {run.model}' if run.is_exported else ''}; {ways}")
    return ""


def rate_change(recipe: Recipe, saved: dict) -> str:
    """Return a line about a learning rate that jumps, as where a schedule now has more steps; "" where none does."""
    was, update = saved["record"].get("learning_rate"), saved["updates"]
    now, following = learning_rate(recipe, update), learning_rate(recipe, update + 1)  # a skipped step had the latter
    if was is None or math.isclose(was, now, rel_tol=1e-6) or math.isclose(was, following, rel_tol=1e-6):
        return ""
    return f"learning rate: {was:g} at step {saved['step']}, {following:g} at the next, as the schedule is another now"


def build_engine(context: Context, built: Built) -> Engine:
    """Build the strategy's engine with the initial weights, and let the task compute what it needs of them.

    Raises:
        TopologyError, StorageError, ConfigurationError: see factory.build.
    """
    engine = factory.build(context.accelerator, context.plan, built.skeleton, built.task)
    # before a checkpoint replaces the weights: DPO's reference is the initial model
    context.watch.phase("prepare")
    initial = InitialState(engine, context.recipe, built.skeleton, context.world, context.watch.progress)
    built.task.prepare(initial)
    return engine


def restore(context: Context, engine: Engine, checkpoints: Checkpoints) -> TrainProgress:
    """Load the selected checkpoint into the engine and return its position; the position of a fresh run without one.

    Raises:
        CheckpointError: the checkpoint does not fit the model, or cannot be read.
    """
    context.watch.phase("load")
    context.accelerator.attach_run(engine, checkpoints)
    checkpoint = checkpoints.resumed_from
    return (context.accelerator.load_state(checkpoint) if checkpoint else None) or TrainProgress()


def make_up_evaluation(
    context: Context, built: Built, engine: Engine, checkpoints: Checkpoints, start: TrainProgress
) -> TrainProgress:
    """Evaluate after the checkpoint's step if that failed in the last session, or was on other rows. Collective.

    Returns:
        The position, with the metrics in the step's record.
    """
    recipe, validation, folder = context.recipe, _validation(context, built, engine), checkpoints.resumed_from
    is_own = folder is not None and folder.resolve().parent == context.run.checkpoints.resolve()
    is_due = due(start.step, recipe.evaluate.every_steps, recipe.steps)
    if validation is None or not (is_own and is_due) or "eval_loss" in start.record:
        return start
    context.progress.log(f"evaluating after step {start.step} first: its metrics are missing, or of other rows")
    stopping = EarlyStopping(recipe, start.stopping)
    metrics = context.evaluate(validation, engine, built.task, start.step, stopping)
    start = replace(start, record=start.record | metrics, stopping=stopping.state)
    if recipe.checkpoint.best:  # which is chosen by the metrics in the checkpoints
        context.accelerator.save_state(position=start, wait=True)
    return start


def _validation(context: Context, built: Built, engine: Engine) -> Evaluation | None:
    rows, size = built.task.validation, context.recipe.batch.micro_batch_size
    return None if rows is None else Evaluation(rows, size, engine.shard, context.watch.progress)


def open_run(context: Context, built: Built, engine: Engine, checkpoints: Checkpoints, start: TrainProgress) -> Session:
    """Open the rows and the run's records at the first step of this session, write run.json and print the header."""
    recipe, task, log = context.recipe, built.task, context.progress.log
    early_stopping = EarlyStopping(recipe, start.stopping)
    last_step = start.step if early_stopping.is_over else recipe.steps
    trains = start.step < last_step
    if trains:
        _check_room(context, built, engine, checkpoints)
    if context.world.is_main and recipe.checkpoint.mirror is not None:
        mirror = Mirror(ObjectStore(recipe.checkpoint.mirror), context.run.path, recipe.checkpoint.keep, log)
        # before `begin`, after which a restart resumes from the newest one of the store
        mirror.start(start.step, context.plan.fresh)
        checkpoints.mirror = mirror
    context.run.begin(start.step, start.record, context.watch.local_progress, trains)
    batches = StepBatches(
        task.train,
        recipe.seed,
        recipe.batch,
        engine.shard,
        last_step,
        start.step,
        start.samples,
        start.anchor,
        recipe.data.num_workers,
        task.count,
        ControlGroup().start_sum,  # of its own, because the loader's thread uses it in parallel with `world`
    )
    is_chunked = engine.describe().loss_implementation != "full"
    meter = Meter.for_run(recipe, built.skeleton, context.accelerator, task, is_chunked)
    meter.state = start.meter
    session = Session(
        context=context,
        built=built,
        engine=engine,
        checkpoints=checkpoints,
        start=start,
        batches=batches,
        validation=_validation(context, built, engine),
        meter=meter,
        guard=Guard(recipe.numerics, context.run, context.world),
        stop_vote=StopVote(context.world),
        recompilations=Recompilations(recipe.compile in COMPILED, log, start.record.get("recompilations", 0)),
        garbage=GarbageCollection(
            start.step + 1,
            recipe.memory.garbage_collection_steps,
            (recipe.evaluate.every_steps, recipe.checkpoint.every_steps),
            meter.restart_clock,
        ),
        early_stopping=early_stopping,
        wait_advice=WaitAdvice(recipe.data),
    )
    _introduce(session)
    return session


def _check_room(context: Context, built: Built, engine: Engine, checkpoints: Checkpoints) -> None:
    """Compare what the run will write with the free space, see `room.check_room`. Collective.

    The token cache is complete by now.
    """
    recipe, run, skeleton = context.recipe, context.run, built.skeleton
    checkpoint_bytes = context.world.conclude(checkpoints.num_bytes(engine), sum)
    adapter = sum(shape.numel() for shape in trained_shapes(skeleton).values())
    num_exported = adapter if is_adapted(skeleton) else skeleton.num_parameters()
    export_bytes = ExportTarget.dtype.itemsize * num_exported if recipe.export.enabled else 0
    disk = LocalFileSystem()

    def check() -> str:
        commit.sweep(disk, run.checkpoints)  # what a save left that was killed
        # those of another run are only moved aside, which frees nothing
        num_kept = len(list_checkpoints(disk, run.checkpoints)) if run.continues else 0
        unchanged = weights.kept_tensors(skeleton, recipe).values() if export_bytes else ()
        num_exported_bytes = export_bytes + sum(stored.num_bytes for stored in unchanged)
        needs = room.needs(recipe, run.checkpoints, checkpoint_bytes, num_exported_bytes, num_kept)
        return room.check_room(needs, num_kept, disk.free_bytes)

    context.progress.log(context.world.on_main(check))


def _introduce(session: Session) -> None:
    """Write run.json and print the header, both with the live configuration."""
    context, built, engine = session.context, session.built, session.engine
    plan, recipe, accelerator = context.plan, context.recipe, context.accelerator
    if session.batches.num_steps == session.start.step and (context.run.path / "run.json").is_file():
        context.progress.log(context.run.notice)
        context.progress.log(f"no step is left to train: {session.start.step} of {recipe.steps} are done")
        return  # run.json stays that of the session that trained
    warning, predicted = None, {}
    if accelerator.is_main_process:
        warning = matmul_speed.precision_warning(recipe, built.skeleton, accelerator.device) or None
        # on rank 0, which alone knows the peak of its device
        peak = session.meter.machine.peak
        predicted = settle.predict(context, built.skeleton.config.to_dict(), peak and peak.tflops)
    resumed_from = session.checkpoints.resumed_from
    parts = {"train": built.task.train, "held_out": built.task.validation}
    facts = RunFacts(
        plan=plan,
        engine=engine.describe(),
        model=weights.describe(built.skeleton, recipe),
        data=built.task.describe(),
        data_fingerprints={name: rows.fingerprint for name, rows in parts.items() if rows is not None},
        device=factory.device_name(accelerator),
        adapter=built.identity["adapter"],
        counts=built.task.counts,
        flops=session.meter.flops,
        compile_choice=context.compile_choice,
        precision_warning=warning,
        allocator=factory.allocator(accelerator),
        cudnn_attention=cudnn.describe(accelerator.device),
        attention_choice=choice.describe_choice(recipe, accelerator.device),
        optimizer_groups=[
            *filter(None, [roles_of(built.skeleton).describe(recipe.optimizer, trained_shapes(built.skeleton))]),
            *describe_groups(built.skeleton, recipe.optimizer),
        ],
        router_loss=routers.describe(recipe.model.router_loss, built.skeleton),
        num_fp8_modules=fp8.count(built.skeleton, recipe.fp8),
        predicted=predicted,
        resumed_from=str(resumed_from) if resumed_from else None,
        start_step=session.start.step,
    )
    if accelerator.is_main_process:
        write_bad_rows(built.task.bad_rows, context.run.path / BAD_ROWS)
    context.run.write_run(facts.to_json())
    context.world.on_main(lambda: start_trackers(accelerator, recipe, session.start.step, context.progress.log))
    context.progress.log(context.run.notice)
    context.progress.header(facts)
    context.progress.advice = partial(factory.busy_advice, accelerator)
    context.progress.log(factory.core_advice(context.world))


def start_trackers(accelerator: Trackers, recipe: Recipe, last_step: int, log: Callable[[str], None]) -> None:
    """Start the recipe's trackers, in folders of the run directory. For rank 0.

    Args:
        last_step: the last step of the earlier session's checkpoint, 0 in a fresh run.
        log: prints a line.

    Raises:
        ConfigurationError: lists the trackers that cannot start, under `logging.on_failure: stop`.
        StorageError: the disk is full.
    """
    run = Path(recipe.output_dir)
    folder = run / "trackers"
    if {*recipe.logging.trackers} - {"tensorboard"}:
        folder.mkdir(exist_ok=True)
    lines: list[str] = []
    accelerator.report = lines.append
    options = {
        "tensorboard": {"run_name": "tensorboard"},
        "aim": {"logging_dir": str(folder)},
        "wandb": {} if os.environ.get("WANDB_DIR") else {"dir": str(folder)},
    }
    accelerator.init_trackers(run.resolve().name, init_kwargs=options, last_step=last_step)
    accelerator.report = log
    failures = accelerator.tracker_failures
    # hours of training are not lost to a tracker's server
    if failures and recipe.logging.on_failure == "stop" and not is_restart(os.environ):
        for cause in filter(None, map(known_cause, failures.values())):
            raise cause
        fix = "set up its environment variables{}, remove it, or train without it (logging.on_failure=warn)"
        fixes = {"wandb": fix.format(" (WANDB_MODE=offline needs no account)")}
        parts = (f"  {failure(name, error)}; {fixes.get(name, fix.format(''))}" for name, error in failures.items())
        raise ConfigurationError("\n".join(["logging.trackers: a tracker cannot start", *parts]))
    for line in lines:
        log(line)
