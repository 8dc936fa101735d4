"""Micro-batches of each optimizer step and of an evaluation."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from samecurve.data.datasets.base import LengthGroups, RowArrays, Rows
from samecurve.data.micro_batch import BatchFacts, Counts, MicroBatch
from samecurve.data.sampler import Steps
from samecurve.distributed.affinity import init_worker
from samecurve.losses.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from samecurve.config.schema import Batch

Pinned = TypeVar("Pinned", MicroBatch, Tensor)

_PREFETCHED_STEPS = 2
DATA_WAIT = "samecurve: data wait"  # label in a profile


class StepBatches:
    """Iterator over the optimizer steps of one data-parallel rank: one list of micro-batches per step, prefetched.

    Batch.micro_batches gives their rows. Where that is 0, the micro-batch has one row that trains nothing. The rows are
    a pure function of the step. With G = batch.global_batch_size, step s reads the global positions
    [s * G, (s + 1) * G), whatever the shard and the micro-batch size. No step reads a row twice if the data have at
    least G rows.

    Args:
        batch: batch sizes of the recipe.
        shard: (data-parallel rank, data-parallel size).
        start_step: step to resume at; no earlier rows are read.
        start_samples: rows consumed before start_step; None: start_step * G.
        anchor: `anchor` of the checkpoint that is resumed from.
        num_workers: processes that prepare the steps; 0 uses a thread. The number does not change the rows.
        count: Task.count, with which each micro-batch is examined (MicroBatch.facts); None: they are not examined.
        start_sum: starts to add up numbers over all ranks, on a group of its own: while a step is trained, the loader's
            thread sums the counts of later ones. Every rank starts the same sums in the order of the steps.

    Attributes:
        lost_worker: how a worker process ended before its time, "" while none did. The steps are then prepared without
            workers, so that all ranks can go on to a common step, save, and stop.
    """

    def __init__(
        self,
        rows: Rows,
        seed: int,
        batch: Batch,
        shard: tuple[int, int],
        num_steps: int,
        start_step: int = 0,
        start_samples: int | None = None,
        anchor: dict | None = None,
        num_workers: int = 0,
        count: Callable[..., int] | None = None,
        start_sum: Callable[[Sequence[int]], Future[list[Tensor]]] | None = None,
    ):
        self.rows, self.seed, self.batch, self.shard = rows, seed, batch, shard
        self.num_steps, self.num_workers = num_steps, num_workers
        self._count, self._start_sum = count, start_sum
        self.step = start_step
        given = start_step * batch.global_batch_size if start_samples is None else start_samples
        self._origin = given - start_step * batch.global_batch_size  # not 0 if an earlier session had another size
        self._steps = Steps.of(batch.global_batch_size, given, anchor)
        self.last_wait_seconds = 0.0
        self.lost_worker = ""
        rows.plan(seed, self._steps, num_steps, anchor or {})

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks, including the current step."""
        return self._origin + self.step * self.batch.global_batch_size

    @property
    def anchor(self) -> dict:
        """State of the rows and their order that a checkpoint needs to resume here, in addition to `samples`."""
        return self.rows.anchor(self.samples) | self._steps.history

    @property
    def num_inputs(self) -> int:
        """Input tokens of all ranks in the current step, trained or not, without padding."""
        return self.rows.num_inputs(self.rows_of(self.step - 1))

    @property
    def epoch(self) -> float:
        """Passes over the rows, as a fraction."""
        return self.samples / len(self.rows)

    def at(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the given 0-based step."""
        return self._micro_batches(self._whole(step))

    def longest(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the longest rows of all: a step that no other step exceeds in width."""
        rows, size = None, self.batch.global_batch_size
        if isinstance(self.rows, LengthGroups):  # all others have steps of one width
            rows = np.resize(np.argsort(-self.rows.sizes, kind="stable")[:size], size)
        return self._micro_batches(self._whole(self.step, rows))

    def _micro_batches(self, whole: MicroBatch) -> list[MicroBatch]:
        """Split `_whole` into micro-batches, as many as the rank with most rows has."""
        rank, size = self.shard
        if not self.batch.rows_per_rank(size)[rank]:
            whole = whole.first_without_labels()
        micro_batches = whole.split(self.batch.micro_batch_size)
        missing = self.batch.accumulation_steps(size) - len(micro_batches)
        micro_batches += whole.first_without_labels().split(1) * missing
        if self._count is None:
            return micro_batches
        examined = []
        for batch in micro_batches:
            facts = BatchFacts.of(batch, self._count)
            # the whole step is pinned already; these tensors are new
            positions = None if facts.positions is None else _pinned(facts.positions)
            documents = facts.documents and facts.documents._replace(starts=_pinned(facts.documents.starts))
            examined.append(replace(batch, facts=facts._replace(positions=positions, documents=documents)))
        return examined

    def _whole(self, step: int, rows: np.ndarray | None = None) -> MicroBatch:
        """Return this rank's rows of a step as one batch. rows: replace those that the step reads."""
        # Split into micro-batches later, so that workers send few large tensors instead of many small ones.
        rank, size = self.shard
        together = self.rows_of(step) if rows is None else rows
        most, allowed = self.rows.most_reads(together)
        assert most <= allowed, f"step {step} reads a row {most} times, {allowed} at most are needed"
        shares = self.batch.rows_per_rank(size)
        first = sum(shares[:rank])
        mine = slice(first, first + shares[rank]) if shares[rank] else slice(1)  # one row to copy, if there is none
        drawn = self.rows.drawn(together[mine], self._positions(step)[mine], self.seed)
        places = torch.arange(self.batch.global_batch_size)[mine]
        return replace(_whole(drawn, self.rows.width(together)), step=step, places=places)

    def rows_of(self, step: int) -> np.ndarray:
        """Return the rows that all ranks together read in the given 0-based step, int64 (global_batch_size,)."""
        return self.rows.at_positions(self._positions(step), self.seed, self._steps)

    def _positions(self, step: int) -> np.ndarray:
        start = self._origin + step * self.batch.global_batch_size
        return np.arange(start, start + self.batch.global_batch_size)

    def __iter__(self) -> Generator[list[MicroBatch]]:
        """Yield the micro-batches of each step from `step` on.

        Increments `step`, and sets `last_wait_seconds` to the time that the loop waited for the step's data.
        """
        # a loop that is left early ends the thread and the workers, too
        with closing(self._prepared()) as prepared:
            while True:
                began = time.perf_counter()
                with record_function(DATA_WAIT):
                    micro_batches = next(prepared, None)
                if micro_batches is None:
                    return
                self.last_wait_seconds = time.perf_counter() - began
                self.step += 1
                yield micro_batches

    def _prepared(self) -> Generator[list[MicroBatch], None, None]:
        """Prepare steps in a thread, which sums their counts in the background."""
        upcoming = range(self.step, self.num_steps)
        # Workers are forked here, before the thread exists: they would inherit locks that it holds, but not the thread.
        here = map(_pinned, map(self._whole, upcoming))
        wholes = self._guarded(upcoming, self._by_workers(upcoming)) if self.num_workers else here

        def make() -> list[MicroBatch]:
            own = self._micro_batches(next(wholes))
            if self._count is None or self._start_sum is None:
                return own
            sums = self._start_sum(Counts.of_step(own, self._count))
            return [replace(batch, facts=batch.facts and batch.facts._replace(step_sums=sums)) for batch in own]

        # one thread, because every rank has to start the sums in the order of the steps
        with ThreadPoolExecutor(1, thread_name_prefix="step-batches") as pool:
            pending = deque(pool.submit(make) for _ in upcoming[:_PREFETCHED_STEPS])
            for index in range(len(upcoming)):
                micro_batches = pending.popleft().result()
                pending.extend(pool.submit(make) for _ in upcoming[index + _PREFETCHED_STEPS :][:1])
                yield micro_batches

    def _guarded(self, steps: range, prepared: _MultiProcessingDataLoaderIter) -> Iterator[MicroBatch]:
        """Yield what workers prepare; once one of them has died, prepare the other steps in this process."""
        for step in steps:
            if not self.lost_worker:
                try:
                    whole = next(prepared)
                except (RuntimeError, OSError, EOFError):  # the last two from its pipes
                    dead = [worker for worker in prepared._workers if worker.join(1.0) or worker.exitcode]
                    if not dead:  # an error that a worker met and sent
                        raise
                    code, fewer = dead[0].exitcode, "data.num_workers=0"  # the code of a signal is negative
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                    self.lost_worker = f"a process that prepares data (pid {dead[0].pid}) {how}"
                    if self.num_workers > 1:
                        fewer = f"data.num_workers (now {self.num_workers}), or 0 for none"
                    if code == -signal.SIGKILL:
                        self.lost_worker += f"; out of memory? Give the run more memory, or use a lower {fewer}"
            yield _pinned(self._whole(step)) if self.lost_worker else whole

    def _by_workers(self, steps: range) -> _MultiProcessingDataLoaderIter:
        """Prepare steps in worker processes, one whole step per worker. PyTorch's DataLoader keeps their order."""
        loader = DataLoader(
            _Steps(self._whole),
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCHED_STEPS,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=init_worker,
            # Spawned workers would be sent a copy of all tokens; forked ones share the pages of the file.
            multiprocessing_context="fork",
            # Without its own generator the loader would draw from the generator of dropout.
            generator=torch.Generator(),
        )
        on_child_end = signal.getsignal(signal.SIGCHLD)
        try:
            return _MultiProcessingDataLoaderIter(loader)  # as iter() does
        finally:
            # PyTorch's handler raises a worker's death in the main thread wherever that is, also within an update.
            # Without it, waiting for the worker's step finds out within 5 s.
            if on_child_end is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, on_child_end)


@dataclass(frozen=True)
class _Steps(Dataset):
    """Dataset whose items are whole steps, for the DataLoader."""

    make: Callable[[int], MicroBatch]

    def __getitem__(self, step: int) -> MicroBatch:
        return self.make(step)


class EvaluationBatches(Sequence[MicroBatch]):
    """Micro-batches of an evaluation: every row exactly once over all shards, in order.

    Each shard has the same number of micro-batches. The last ones are padded with copies of row 0 whose labels are
    ignored. Micro-batches are built lazily, because held-out data may be large.

    Args:
        micro_batch_size: most rows per micro-batch.
        shard: (data-parallel rank, data-parallel size).
        alive: called for each micro-batch, to report progress to the watchdog.
    """

    def __init__(
        self, rows: Rows, micro_batch_size: int, shard: tuple[int, int], alive: Callable[[], None] = lambda: None
    ):
        self.rows, self.shard = rows, shard
        # not more than a shard's rows: the rest would be padding
        self.micro_batch_size = min(micro_batch_size, -(-len(rows) // shard[1]))
        self._alive = alive

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.micro_batch_size * self.shard[1]))

    def __getitem__(self, index: int) -> MicroBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._alive()
        # consecutive rows for each shard, so that results gathered in rank order are in the order of the rows
        first = (self.shard[0] * len(self) + index) * self.micro_batch_size
        indices = np.arange(first, first + self.micro_batch_size)
        exists = indices < len(self.rows)
        rows = np.where(exists, indices, 0)
        read = self.rows[rows]
        labels = read.labels.copy()
        labels[~exists] = IGNORE_INDEX
        arrays = RowArrays(read.inputs, read.targets | {"labels": labels})
        (micro_batch,) = _pinned(_whole(arrays, self.rows.width(rows))).split(self.micro_batch_size)
        return micro_batch


def _whole(rows: RowArrays, width: int) -> MicroBatch:
    return MicroBatch(_tensors(rows.inputs, width), _tensors(rows.targets, width))


def _tensors(arrays: dict[str, np.ndarray], width: int) -> dict[str, Tensor]:
    cut = {name: array[..., :width] if array.ndim > 1 else array for name, array in arrays.items()}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in cut.items()}


def _pinned(data: Pinned) -> Pinned:
    """Pin the memory if there is a GPU, so that it can copy the data while it computes."""
    return data.pin_memory() if torch.cuda.is_available() else data
