"""Construction of everything that the training loop uses, in order of dependency."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.checkpoint.resume import read_state
from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.errors import NothingToDo, NumericError, Preempted
from samecurve.export.hf_export import export
from samecurve.export.model_card import ExportInfo, write_card
from samecurve.interfaces.task import InitialState
from samecurve.metrics.console import Progress
from samecurve.metrics.data_wait import WaitAdvice
from samecurve.metrics.meter import Meter
from samecurve.metrics.profiling.recorder import Profiler, ProfilerHooks
from samecurve.models import fp8, liger, matmul_speed, routers, weights
from samecurve.models.compilation import Recompilations
from samecurve.run.metadata import resume_identity, run_facts
from samecurve.specs.model_families import check_packing
from samecurve.tasks import registry
from samecurve.training.evaluator import Evaluation
from samecurve.training.gc_schedule import GarbageCollection
from samecurve.training.numerics_guard import Guard

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator
    from torch import Tensor
    from transformers import PreTrainedModel

    from samecurve.interfaces.task import Task
    from samecurve.run.lifecycle import RunSupervisor
    from samecurve.run.run_directory import RunDirectory
    from samecurve.strategy.plan import Plan


@dataclass(frozen=True)
class Built:
    """The task, its model on the meta device (`skeleton`), and the identity that a checkpoint has to match."""

    task: Task
    skeleton: PreTrainedModel
    identity: dict


def build_model(plan: Plan, world: ControlGroup) -> Built:
    """Load the task and build the model on the meta device, identically on every rank.

    Raises:
        DataError: the data or the tokenizer cannot be used.
        ConfigurationError: the model does not support the recipe.
    """
    recipe = plan.recipe
    task = registry.load_on_all_ranks(recipe, world)
    skeleton = weights.skeleton(recipe, task.vocabulary_size, task.special_tokens, task.head)
    check_packing(skeleton.config.model_type, recipe.data.packing)
    liger.check_family(recipe.model.kernels, skeleton.config.model_type)
    return Built(task, skeleton, resume_identity(plan, skeleton, task))


class Session:
    """One execution of train.py: from the first step or from an earlier session's checkpoint to the end.

    Attributes:
        start: TrainProgress at the beginning of this session.
        plan: see Plan.
        run: see RunDirectory.
        watch: see RunSupervisor.
    """

    def __init__(self, plan: Plan, accelerator: Accelerator, run: RunDirectory, watch: RunSupervisor):
        self.plan, self.recipe, self.accelerator, self.run, self.watch = plan, plan.recipe, accelerator, run, watch
        self.world = ControlGroup()  # all ranks have connected by now
        self.progress = Progress(
            self.recipe.steps, self.recipe.logging.every_steps, enabled=accelerator.is_main_process
        )
        watch.phase("build")
        built = build_model(plan, self.world)
        self.task, self.skeleton = built.task, built.skeleton
        found = self._find_checkpoint(built.identity)
        self.engine = factory.build(accelerator, plan, self.skeleton, self.task)
        watch.phase("prepare")
        self.task.prepare(InitialState(self.engine, self.recipe, self.skeleton, self.world, watch.progress))
        watch.phase("load")
        self.start = self.checkpoints.load(found, self.engine) if found else TrainProgress()
        run.begin(self.start.step, self.start.record, watch.local_progress)
        self._open_data()
        self._open_records()
        self._introduce(found, built.identity["adapter"])

    def _find_checkpoint(self, identity: dict) -> Path | None:
        """Find the checkpoint to resume from, if any.

        Raises:
            NothingToDo: the same command has already completed; raised on all ranks.
        """
        background = self.recipe.checkpoint.background
        if background is None:
            # a background save copies the state to host memory, where state offloaded to NVMe would not fit
            background = "optimizer:nvme" not in self.plan.strategy.offload
        self.checkpoints = Checkpoints(
            self.run, identity, self.world, self.progress.log, self.watch.local_progress, background
        )
        found = self.checkpoints.find(self.plan.resume)
        has_all_outputs = self.run.is_exported or not self.recipe.export.enabled
        is_complete = self.world.all_gather_object(self.run.is_done and has_all_outputs)[0]  # rank 0's view counts
        if found and is_complete and read_state(found)["step"] >= self.recipe.steps:
            where = f"the model is in {self.run.model}" if self.run.is_exported else f"its last step is in {found}"
            raise NothingToDo(
                f"already done at step {self.recipe.steps}, nothing to train: {where}; more steps=..., another "
                "output_dir or --fresh would train"
            )
        return found

    def _open_data(self) -> None:
        """Open the training rows at this session's first step, and the validation rows."""
        shard, batch = self.engine.shard, self.recipe.batch
        self.batches = StepBatches(
            self.task.train,
            self.recipe.seed,
            batch,
            shard,
            self.recipe.steps,
            self.start.step,
            self.start.samples,
            self.start.anchor,
            self.recipe.data.num_workers,
        )
        self.validation = None
        if self.task.validation is not None:
            self.validation = Evaluation(self.task.validation, batch.micro_batch_size, shard, self.watch.progress)

    def _open_records(self) -> None:
        """Create the objects that measure and check each step."""
        recipe, log = self.recipe, self.progress.log
        chunked = self.engine.describe().loss_implementation != "full"
        self.meter = Meter.for_run(recipe, self.skeleton, self.accelerator, self.task, chunked)
        self.meter.state = self.start.meter
        self.guard = Guard(recipe.numerics, self.run, self.world)
        earlier = self.start.record.get("recompilations", 0)
        self.recompilations = Recompilations(recipe.compile != "off", log, earlier)
        every = recipe.memory.garbage_collection_steps
        others = (recipe.evaluate.every_steps, recipe.checkpoint.every_steps)
        self.garbage = GarbageCollection(self.start.step + 1, every, others, self.meter.start)
        self._advice = WaitAdvice(recipe.data)
        self._logging = True

    def profiler(self) -> Profiler:
        """Create the profiler for profile.steps. Call after the meter has started."""
        hooks = ProfilerHooks(
            folder=self.run.profile,
            rank=self.world.rank,
            log=self.progress.log if self.world.is_main else print,
            progress=self.watch.local_progress,
            restart_clock=self.meter.start,
            held=self.engine.held_bytes,
        )
        return Profiler(self.recipe.profile, self.start.step, hooks)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let a checkpoint that is being written finish before a NumericError, raised on all ranks, propagates."""
        try:
            yield
        except NumericError:
            with suppress(NumericError):  # the first error is more informative
                self.checkpoints.wait()
            raise

    def log(self, record: dict) -> None:
        """Log the step's record to the trackers. A failed write is reported once and does not end the run."""
        self.progress.log(self._advice.after(record))
        self.progress.log(self.meter.doubt(record))
        if not self._logging:
            return
        try:
            self.accelerator.log(self.meter.scalars(record), step=record["step"])
        except OSError as error:
            self._logging = False
            self.progress.log(
                f"{self.run.tensorboard}: {error}; nothing more is written there, metrics.jsonl has it all"
            )

    def roll_back(self, updates: int) -> int:
        """Restore the last checkpoint's weights after a loss spike.

        Returns:
            The number of updates applied to the restored weights; `updates` if there is no checkpoint.
        """
        position = self.checkpoints.roll_back(self.engine)
        if position is None:
            return updates
        self.meter.state = position.meter
        self.meter.start()
        return position.updates

    def stop_if_asked(self, here: TrainProgress) -> None:
        """Save a checkpoint and raise Preempted on all ranks if any rank has received a request to stop."""
        self.watch.phase("boundary", here.step)
        reason = self.world.first_nonempty(self.watch.requested)
        if reason:
            self.watch.phase("save", here.step)
            self.checkpoints.secure(self.engine, here)
            raise Preempted(f"{reason}: saved after step {here.step}; the same command goes on from there")

    def export(self) -> None:
        if not self.recipe.export.enabled:
            return
        self.watch.phase("export", self.recipe.steps)
        where, is_main = self.run.model, self.accelerator.is_main_process
        card = partial(write_card, self.run.path, ExportInfo())
        beside = self.task.write_beside
        export(
            self._parameters(),
            self.skeleton,
            self.task.tokenizer,
            where,
            is_main,
            card=card,
            write_beside=beside,
            busy=self.watch.local_progress,
        )
        self.run.sync_metrics()
        self.progress.log(f"the trained model is in {self.run.model}")

    def _parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        for pair in self.engine.parameters():
            self.watch.progress()
            yield pair

    def _introduce(self, found: Path | None, adapter: dict | None) -> None:
        """Write run.json and print the header, both with the live configuration."""
        described = weights.describe(self.skeleton, self.recipe) | asdict(self.engine.describe()) | {"adapter": adapter}
        described |= {"allocator": factory.allocator(self.accelerator)}
        described |= {"num_fp8_modules": fp8.count(self.skeleton, self.recipe.fp8)}
        described |= {"router_loss": routers.describe(self.recipe.model.router_loss, self.skeleton)}
        facts = run_facts(self.plan, described, self.task.describe(), factory.device_name(self.accelerator))
        facts |= {"flops": self.meter.flops, "counts": self.task.counts}
        if self.accelerator.is_main_process:
            warning = matmul_speed.precision_warning(self.recipe, self.skeleton, self.accelerator.device)
            facts |= {"precision_warning": warning or None}
        facts |= {"resumed_from": found and str(found), "start_step": self.start.step}
        parts = {"train": self.task.train, "held_out": self.task.validation}
        facts |= {"data_fingerprints": {name: rows.fingerprint for name, rows in parts.items() if rows is not None}}
        self.run.write_run(facts)
        # repeated steps replace those that the earlier session logged after its last checkpoint
        purge = {"purge_step": self.start.step + 1}
        self.accelerator.init_trackers(self.run.tensorboard.name, init_kwargs={"tensorboard": purge})
        self.progress.log(self.run.notice)
        self.progress.header(facts)
        self.progress.log(factory.core_advice(self.accelerator, self.plan.strategy, self.world))
