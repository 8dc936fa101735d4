"""Recording of the steps selected by profile.steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerAction, profile

from samecurve.errors import StorageError
from samecurve.metrics.profiling.dimensions import GroupNotes
from samecurve.metrics.profiling.summary import render_summary, summary_lines, summary_values
from samecurve.metrics.profiling.trace import breakdown, read_trace
from samecurve.storage.atomic import storage_errors, write_json, write_text
from samecurve.strategy.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from samecurve.config.schema import Profile
    from samecurve.interfaces.engine import MemoryUsage

_NSYS = "NSYS_PROFILING_SESSION_ID"  # Nsight Systems sets it for the program that it starts
_MOST_ALLOCATIONS = 200_000  # events of several KB each; PyTorch's default is no limit


@dataclass(frozen=True)
class ProfilerHooks:
    """Connections of the profiler to the rest of the run.

    Attributes:
        folder: where traces and summaries are written.
        log: prints a line for the user.
        progress: reports progress, because writing a trace may take long.
        restart_clock: excludes the time spent on recording from the step time.
        memory_usage: returns the memory that this rank uses now (Engine.memory_usage).
        unlike: whether ranks do different work, so that each recorded one writes a summary, and not the first alone.
        dims: how the processes are arranged.
    """

    folder: Path
    rank: int
    log: Callable[[str], None]
    progress: Callable[[], None]
    restart_clock: Callable[[], None]
    memory_usage: Callable[[], MemoryUsage]
    unlike: bool = False
    dims: ParallelDims = ParallelDims()


class Profiler:
    """Writes a trace and a summary of `settings.steps`: (first, last), 1-based, inclusive.

    Create it before the first batch is requested and call `after` at the end of each step. Both do nothing if this rank
    has nothing (more) to record. done: the number of steps that earlier sessions completed. Under Nsight Systems, which
    uses the device's tracing itself, each of the steps and each operator is an NVTX range for nsys instead.
    """

    def __init__(self, settings: Profile, done: int, around: ProfilerHooks):
        self._around = around
        self._recording: profile | None = None
        self._nsys: ExitStack | None = None
        self._notes = GroupNotes(around.dims, around.rank)
        self._first, self._last = settings.steps or (0, 0)
        self._starts_at = 0  # never
        if settings.steps is None or around.rank not in settings.ranks:
            return
        if self._last <= done:
            steps = f"steps {self._first} to {self._last}"
            around.log(f"profile.steps: {steps} are not profiled, because the run resumes after step {done}")
            return
        self._first = max(self._first, done + 1)
        self._starts_at = max(self._first - 1, done + 1)  # the step before the first one warms up
        if _NSYS in os.environ and torch.cuda.is_available():
            self._nsys = ExitStack()
        self._folder = around.folder / f"step_{self._first:08d}"
        self._name = f"rank{around.rank}"
        first = around.rank == min(settings.ranks)
        self._summary = "summary" if first else f"summary_{self._name}" if around.unlike else ""
        self._before(done + 1)

    def after(self, step: int) -> None:
        if self._nsys is not None and self._first <= step <= self._last:
            torch.cuda.nvtx.range_pop()
            if step == self._last:
                self._nsys.close()
        if self._recording is not None:
            if step == self._last:
                self._notes.end(self._recording)
            self._recording.step()
            if step == self._last:
                self._recording.stop()
                self._recording = None
                self._around.restart_clock()
        self._before(step + 1)

    def _before(self, step: int) -> None:
        if self._nsys is not None:
            if step == self._first:
                self._nsys.enter_context(torch.cuda.profiler.profile())  # nsys profile --capture-range=cudaProfilerApi
                self._nsys.enter_context(emit_nvtx())
            if self._first <= step <= self._last:
                torch.cuda.nvtx.range_push(f"step {step}")
            return
        if step == self._starts_at:
            # Without Python stacks (with_stack), which would take a large part of the measured time.
            self._recording = profiler = profile(
                schedule=self._action, on_trace_ready=self._write, record_shapes=True, profile_memory=True
            )
            # The profiler counts from 0 by default; the ranges in the trace should have the run's step numbers.
            profiler.step_num, profiler.current_action = step, self._action(step)
            profiler.start()
            if torch.cuda.is_available():
                # without C++ stacks: capturing them would slow down the recorded steps
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)
        if self._recording is not None:
            if step == self._first:
                self._notes.begin()
            self._around.restart_clock()

    def _action(self, step: int) -> ProfilerAction:
        """Choose the profiler's action for a step. The step before the first one, if any, warms up device tracing."""
        if not self._first <= step <= self._last:
            return ProfilerAction.WARMUP if step == self._first - 1 else ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == self._last else ProfilerAction.RECORD

    def _write(self, profiler: profile) -> None:
        try:
            with storage_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                # TensorBoard's profiler plugin requires this suffix; Perfetto and chrome://tracing accept any name.
                path = self._folder / f"{self._name}.pt.trace.json.gz"
                self._around.progress()
                profiler.export_chrome_trace(str(path))
                self._around.progress()
                if torch.cuda.is_available():
                    torch.cuda.memory._dump_snapshot(str(self._folder / f"{self._name}.memory.pickle"))
            if self._summary:
                summarised, held = breakdown(read_trace(path)), self._around.memory_usage()
                self._around.progress()
                summary = self._around.folder / f"{self._summary}.txt"
                write_json(summary.with_suffix(".json"), summary_values(summarised, held, self._around.rank))
                write_text(summary, render_summary(summarised, held, self._around.rank))
                for line in summary_lines(summarised):
                    self._around.log(line)
                self._around.log(f"traces in {self._folder} (for ui.perfetto.dev or TensorBoard), summary in {summary}")
        except Exception as error:  # a failed profile must not end the run
            text = error if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            self._around.log(f"profile.steps: {text}; the profile is incomplete")
        finally:  # otherwise memory history would be recorded until the run ends
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
