"""The session that the training loop gets: its parts, and the actions that need several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from samecurve.accelerator.trackers import failure
from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.data.batches import StepBatches
from samecurve.data.chat_encoder import end_tokens
from samecurve.data.micro_batch import MicroBatch
from samecurve.distributed.control_group import ControlGroup, StopVote
from samecurve.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    NumericError,
    Preempted,
    SamecurveError,
    StorageError,
    WorkerError,
)
from samecurve.export.hf_export import ExportTarget, export
from samecurve.export.model_card import ExportInfo, write_card
from samecurve.export.verification import Verification, sample_batch
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.metrics.console import Progress
from samecurve.metrics.meter import Meter, WaitAdvice
from samecurve.metrics.profiling.recorder import Profiler, ProfilerHooks
from samecurve.models.compilation import Recompilations, uncompiled
from samecurve.models.weights import frozen_tensors, kept_tensors
from samecurve.run.run_directory import SAMPLES
from samecurve.storage.jsonl import JsonlFile
from samecurve.training.evaluator import EarlyStopping, Evaluation
from samecurve.training.gc_schedule import GarbageCollection
from samecurve.training.numerics_guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.base import Rows
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task
    from samecurve.run.lifecycle import RunSupervisor
    from samecurve.run.run_directory import RunDirectory
    from samecurve.strategy.plan import Plan


@dataclass(frozen=True)
class Context:
    """The process of a session, before anything is built: the plan and the means to talk to disk, ranks and console.

    compile_choice: what `compile: auto` became and why, "" under another value.
    """

    plan: Plan
    accelerator: Accelerator
    run: RunDirectory
    watch: RunSupervisor
    world: ControlGroup
    progress: Progress
    compile_choice: str = ""

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    def evaluate(
        self, validation: Evaluation, engine: Engine, task: Task, step: int, early_stopping: EarlyStopping
    ) -> dict[str, float]:
        """Evaluate after `step`, count it for early stopping, and print and return the task's metrics. Collective."""
        self.watch.phase("evaluate", step)
        metrics = validation.metrics(engine, task)
        self.progress.evaluation(step, metrics)
        self.watch.conclusion = early_stopping.evaluated(step, metrics)
        self.progress.log(self.watch.conclusion)
        return metrics


@dataclass(frozen=True)
class Built:
    """The task, its model on the meta device (`skeleton`), and the identity that a checkpoint has to match.

    `constants` are read before the training, because model.path may be gone behind it; see weights.constant_tensors.
    """

    task: Task
    skeleton: PreTrainedModel
    identity: dict
    constants: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """One execution of train.py: what the loop uses, and the actions that need several parts of it.

    Attributes:
        start: position at the beginning of this session.
        batches: micro-batches of the steps that are left.
        validation: None without validation rows.
    """

    context: Context
    built: Built
    engine: Engine
    checkpoints: Checkpoints
    start: TrainProgress
    batches: StepBatches
    validation: Evaluation | None
    meter: Meter
    guard: Guard
    stop_vote: StopVote
    recompilations: Recompilations
    garbage: GarbageCollection
    wait_advice: WaitAdvice
    early_stopping: EarlyStopping

    def profiler(self) -> Profiler:
        """Create the profiler for profile.steps. Call after the meter has started."""
        context = self.context
        hooks = ProfilerHooks(
            folder=context.run.profile,
            rank=context.world.rank,
            log=context.progress.log if context.world.is_main else print,
            progress=context.watch.local_progress,
            restart_clock=self.meter.restart_clock,
            memory_usage=self.engine.memory_usage,
            unlike=self.engine.describe().dims.pp > 1,
            dims=context.plan.strategy.dims,
        )
        return Profiler(context.recipe.profile, self.start.step, hooks)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Before an error propagates, let a save finish, and save the last step if the state is whole on all ranks.

        A checkpoint that is being written finishes before a NumericError, raised on all ranks, propagates. After other
        errors between two steps (of data, of an evaluation) all ranks save if all have met one. If one rank has failed
        alone, the others wait for it in some collective and cannot save.
        """
        try:
            yield
        except NumericError:
            with suppress(NumericError):  # the first error is more informative
                self.checkpoints.wait()
            raise
        except Exception as error:
            whole = self.checkpoints.resumable_at
            known = isinstance(error, SamecurveError) and not isinstance(error, DataError)
            if whole is not None and not (known or self.guard.is_pending):
                self._save_after(error, whole)
            raise

    def _save_after(self, error: Exception, whole: TrainProgress) -> None:
        log = self.context.progress.log
        if self.context.watch.watchdog.cause():  # another rank has failed or died, and this error is an effect
            return
        if not self.stop_vote.all_arrive(whole.step):
            text = f"{type(error).__name__} after step {whole.step} on rank {self.context.world.rank}, not on all ranks"
            print(f"{text}: no checkpoint can be saved; the newest one counts", flush=True)
            return
        try:
            self.context.watch.phase("save", whole.step)
            self.checkpoints.secure(self.engine, whole)
            self._upload_what_is_there()
            log(f"{type(error).__name__} after step {whole.step}: saved; the same command resumes from there")
        except Exception as failure:  # the error itself says more
            log(f"no checkpoint of step {whole.step} could be saved: {failure}")

    def roll_back(self, updates: int) -> int:
        """Restore the last checkpoint's weights after a loss spike. Collective.

        Returns:
            The number of updates applied to the restored weights; `updates` if there is no checkpoint.
        """
        position = self.checkpoints.roll_back(self.engine)
        if position is None:
            return updates
        self.meter.state = position.meter
        self.meter.restart_clock()  # loading belongs to no step's time
        return position.updates

    def evaluate(self, record: dict) -> None:
        """Evaluate on the validation rows, and print the metrics and add them to the step's record. Collective."""
        assert self.validation is not None
        step = record["step"]
        # added before the samples: should these fail, a resumed run must not evaluate and count the step again
        record |= self.context.evaluate(self.validation, self.engine, self.built.task, step, self.early_stopping)
        context, rows, count = self.context, self.built.task.validation, self.context.recipe.evaluate.samples
        if count and rows is not None:
            tokenizer, file = self.built.task.tokenizer, JsonlFile(context.run.path / SAMPLES)
            part = next(part for part in rows.parts if len(part))  # a mixture's sources may hold out nothing
            with uncompiled(context.recipe):
                texts = write_samples(self.engine, part, count, tokenizer, context.world, context.watch.progress)
            for prompt, text in texts if context.world.is_main else ():
                file.append({"step": step, "prompt": prompt, "text": text})
                context.progress.log(f"sample after step {step}: {prompt[-60:]!r} -> {text[:120]!r}")
        self.meter.restart_clock()

    def advise(self, record: dict) -> None:
        """Print what the step's record says about the data loading and the measurements, once each."""
        self.context.progress.log(self.wait_advice.after(record))
        self.context.progress.log(self.meter.doubt(record))

    def is_last(self, step: int) -> bool:
        """Whether the run ends after `step`: the recipe's last one, or by early stopping."""
        return step == self.context.recipe.steps or (self.early_stopping.is_over and not self.guard.is_pending)

    def stop_if_asked(self, here: TrainProgress) -> None:
        """Save a checkpoint and stop all ranks if any has received a request to stop, or has lost a data worker.

        Raises Preempted or WorkerError, the same on all ranks.
        With several ranks, a request takes effect after the step that follows it (see StopVote).
        """
        watch = self.context.watch
        watch.phase("boundary", here.step)
        # a vote, because a signal reaches ranks at different steps and a save needs all of them
        lost = self.batches.lost_worker
        own = (WorkerError, f"rank {self.context.world.rank}: {lost}") if lost else (Preempted, watch.requested)
        at_once = self.is_last(here.step)
        reason = self.stop_vote.reason(own if own[1] else None, at_once)
        if reason is not None:
            kind, text = reason
            watch.phase("save", here.step)
            if self.guard.is_pending:
                self.checkpoints.wait()
                saved = f"not saved after step {here.step}, which was refused; the same command resumes from the newest"
                raise kind(f"{text}: {saved} checkpoint")
            self.checkpoints.secure(self.engine, here)
            self._upload_what_is_there()
            raise kind(f"{text}: saved after step {here.step}; the same command resumes from there")

    def finish(self) -> None:
        """Close the trackers, repeat which of them failed, and finish the mirror, see `finish_mirror`. Collective."""
        for name, error in self.context.accelerator.tracker_failures.items():
            self.context.progress.log(failure(name, error))
        self.context.accelerator.finish_trackers()  # before their files are uploaded
        self.finish_mirror()

    def finish_mirror(self) -> None:
        """Wait until checkpoint.mirror has the run. Collective: a rank that left would make its launcher end rank 0.

        Raises:
            StorageError: something is missing there; raised on all ranks.
        """
        context, mirror = self.context, self.checkpoints.mirror
        if context.recipe.checkpoint.mirror is None:
            return
        context.watch.phase("upload", context.run.step)
        context.world.on_main(lambda: mirror.finish(context.watch.local_progress) if mirror else None)

    def _upload_what_is_there(self) -> None:
        """Finish the mirror before an error propagates. What it lacks is uploaded when the same command runs again."""
        try:
            self.finish_mirror()
        except StorageError as error:
            self.context.progress.log(str(error))

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder, unless export.enabled is false. Collective."""
        context, task, skeleton = self.context, self.built.task, self.built.skeleton
        recipe, verification = context.recipe, None
        if not recipe.export.enabled:
            return
        context.watch.phase("export", recipe.steps)
        best = self.checkpoints.load_best(self.engine) if recipe.export.checkpoint == "best" else None
        # an adapter that was trained on 4-bit weights computes something else on the base model's own
        if not recipe.adapter.quantization and recipe.export.verifies(skeleton.num_parameters()):
            batch = sample_batch(skeleton, recipe)
            with uncompiled(recipe):
                expected = self.engine.outputs(batch)
            if expected is not None:  # on rank 0
                verification = Verification(recipe, batch, expected, context.run.rejected_model)

        def parameters() -> Iterator[tuple[str, Tensor | None]]:
            for pair in self.engine.parameters():
                context.watch.progress()
                yield pair
            yield from self.built.constants.items()
            if context.accelerator.is_main_process:  # the only rank that writes them
                yield from frozen_tensors(skeleton, recipe)

        target = ExportTarget(
            context.run.model,
            task.tokenizer,
            kept=partial(kept_tensors, skeleton, recipe, again=True),
            card=partial(write_card, context.run.path, ExportInfo(step=best)),
            save_task_files=task.save_task_files,
            check=verification or (lambda directory: None),
            busy=context.watch.local_progress,
        )
        try:
            lacks = export(parameters(), skeleton, target, context.accelerator.is_main_process)
        # on rank 0 alone, and the others are uploading by now
        except (NumericError, CheckpointError, StorageError, ConfigurationError):
            self._upload_what_is_there()
            raise
        context.run.sync_metrics()
        context.progress.log(f"the trained model is in {context.run.model}")
        context.progress.log(lacks)
        context.progress.log(verification.result if verification else "")


MOST_NEW_TOKENS = 64
WIDTH = 32  # rows are padded to a multiple


def write_samples(
    engine: Engine,
    rows: Rows,
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    world: ControlGroup,
    busy: Callable[[], None],
) -> list[tuple[str, str]]:
    """Continue the prompts of the first `count` rows, each time by the likeliest token. Collective.

    Every token is a forward pass of all rows without a cache, because sharded and pipelined engines have no other. A
    text ends at the tokenizer's end token, after MOST_NEW_TOKENS tokens, or at the row's length.

    Args:
        busy: called for each token.

    Returns:
        (prompt, text) of each row.
    """
    prompts = [_prompt(rows, index) for index in range(min(count, len(rows)))]
    lengths = [len(prompt) for prompt in prompts]
    width = min(-(-(max(lengths) + MOST_NEW_TOKENS) // WIDTH) * WIDTH, rows.sequence_length)
    ids = torch.full((len(prompts), width), rows.padding_token)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
    positions = torch.arange(width).repeat(len(prompts), 1)
    labels = torch.full_like(ids, IGNORE_INDEX)
    stops, ends = end_tokens(tokenizer, None), list(lengths)
    writing = {row for row, length in enumerate(lengths) if length < width}
    for _ in range(MOST_NEW_TOKENS):
        if not writing:
            break
        busy()
        # later tokens are not attended to, so that rows of different lengths need no mask
        batch = MicroBatch({"input_ids": ids, "position_ids": positions}, {"labels": labels})
        logits = engine.outputs(batch, torch.tensor(ends) - 1)
        likeliest = world.on_main(lambda logits=logits: logits.argmax(dim=-1).tolist() if logits is not None else [])
        for row in tuple(writing):
            ids[row, ends[row]] = likeliest[row]
            ends[row] += 1
            if likeliest[row] in stops or ends[row] == width:
                writing.remove(row)
    spans = zip(ids.tolist(), lengths, ends, strict=True)
    return [(str(tokenizer.decode(row[:length])), str(tokenizer.decode(row[length:end]))) for row, length, end in spans]


def _prompt(rows: Rows, index: int) -> np.ndarray:
    """Return the tokens before the first trained one of a row; half of its first document where all are trained."""
    row = rows[np.array([index])]
    trained = np.flatnonzero(row.labels[0] != IGNORE_INDEX)
    # labels are shifted: the label at t is the token at t + 1
    given = int(trained[0]) + 1 if len(trained) else 1
    starts = np.flatnonzero(row.inputs["position_ids"][0] == 0)  # of the documents of a packed row
    end = int(starts[1]) if len(starts) > 1 else max(len(trained), 1)
    return row.inputs["input_ids"][0, : given if given > 1 else (end + 1) // 2]
