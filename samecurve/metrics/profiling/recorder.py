"""Records the steps that profile.steps asks for, around the loop's own iteration, so that the loop need not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, profile, record_function

from samecurve.errors import StorageError
from samecurve.metrics.profiling import deepspeed_comms
from samecurve.metrics.profiling.op_kinds import DATA_WAIT
from samecurve.metrics.profiling.summary import render_summary, summary_lines, summary_values
from samecurve.metrics.profiling.trace import breakdown, read_trace
from samecurve.storage.atomic import storage_errors, write_json, write_text

if TYPE_CHECKING:
    from samecurve.config.schema import Profile
    from samecurve.data.batches import MicroBatch, StepBatches
    from samecurve.interfaces.memory import Held

_MOST_ALLOCATIONS = 200_000


@dataclass(frozen=True)
class ProfilerHooks:
    """What the recorder has to do with besides the steps.

    log: a line for the user. progress: called because writing a trace may take long. restart_clock: recording is not a
    step's time. held: what this rank holds now (Engine.held_bytes).
    """

    folder: Path
    rank: int
    log: Callable[[str], None]
    progress: Callable[[], None]
    restart_clock: Callable[[], None]
    held: Callable[[], Held]


def profiled_steps(batches: StepBatches, settings: Profile, around: ProfilerHooks) -> Iterator[list[MicroBatch]]:
    """The batches as they are; a trace and a summary of the steps `settings.steps` when those are through.

    Where nothing is to be recorded (any more) on this rank it is the batches' own iterator.
    """
    if settings.steps is None or around.rank not in settings.ranks:
        return iter(batches)
    first, last = settings.steps
    if last <= batches.step:
        around.log(f"profile.steps: the run goes on after step {batches.step}, so steps {first} to {last} are not seen")
        return iter(batches)
    return _Recorder(max(first, batches.step + 1), last, settings, around).over(batches)


class _Recorder:
    """One recording, of the steps first to last; 1-based, both included."""

    def __init__(self, first: int, last: int, settings: Profile, around: ProfilerHooks):
        self._first, self._last, self._around = first, last, around
        self._folder = around.folder / f"step_{first:08d}"
        self._name = f"rank{around.rank}"
        self._speaks = around.rank == min(settings.ranks)

    def over(self, batches: StepBatches) -> Iterator[list[MicroBatch]]:
        step, upcoming = batches.step + 1, iter(batches)
        warm_up = max(self._first - 1, step)
        yield from islice(upcoming, warm_up - step)
        profiler = self._profiler(warm_up)
        profiler.start()
        if torch.cuda.is_available():
            # not C++'s stacks, too: taking them would lengthen the steps that are recorded
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)
        for number in range(warm_up, self._last + 1):
            if number == self._first:
                deepspeed_comms.begin()
            self._around.restart_clock()
            with record_function(DATA_WAIT):
                micro_batches = next(upcoming)
            yield micro_batches
            profiler.step()
        profiler.stop()
        self._around.restart_clock()
        yield from upcoming

    def _profiler(self, step: int) -> profile:
        """With the types and sizes of what operators read, and what they allocate. Not with Python's stacks, which
        would take a large part of the time that is measured."""
        profiler = profile(schedule=self._action, on_trace_ready=self._write, record_shapes=True, profile_memory=True)
        # it counts from 0 otherwise, and the ranges in the trace would not have the run's own numbers
        profiler.step_num, profiler.current_action = step, self._action(step)
        return profiler

    def _action(self, step: int) -> ProfilerAction:
        """The step before the first warms the device's tracing up, where there is one."""
        if not self._first <= step <= self._last:
            return ProfilerAction.WARMUP if step == self._first - 1 else ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == self._last else ProfilerAction.RECORD

    def _write(self, profiler: profile) -> None:
        try:
            with storage_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                found = self._trace(profiler)
            self._summarise(found)
        except Exception as error:  # no reason to end a run, whatever the profiler wrote
            text = error if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            self._around.log(f"profile.steps: {text}; the profile is not whole")
        finally:  # or it would be recorded until the run ends
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)

    def _trace(self, profiler: profile) -> Path:
        # the suffix by which TensorBoard's profiler plugin knows its files; Perfetto and chrome://tracing take any
        path = self._folder / f"{self._name}.pt.trace.json.gz"
        self._around.progress()
        profiler.export_chrome_trace(str(path))
        self._around.progress()
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{self._name}.memory.pickle"))
        return path

    def _summarise(self, path: Path) -> None:
        if not self._speaks:
            return
        logged = deepspeed_comms.logged()
        found, held = breakdown(read_trace(path)), self._around.held()
        self._around.progress()
        summary = self._around.folder / "summary.txt"
        write_json(summary.with_suffix(".json"), summary_values(found, held, self._around.rank, logged))
        write_text(summary, render_summary(found, held, self._around.rank, logged))
        for line in summary_lines(found):
            self._around.log(line)
        self._around.log(f"traces in {self._folder} (for ui.perfetto.dev or TensorBoard), summary in {summary}")
