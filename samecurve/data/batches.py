"""Rows to the micro-batches of each optimizer step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from samecurve.data.datasets.base import RowArrays, Rows
from samecurve.data.sampler import Steps
from samecurve.distributed.cpu_workers import init_worker
from samecurve.losses.cross_entropy import IGNORE_INDEX

if TYPE_CHECKING:
    from samecurve.config.schema import Batch

_PREFETCHED_STEPS = 2
DATA_WAIT = "samecurve: data wait"  # in a profile


@dataclass(frozen=True)
class MicroBatch:
    """What one device reads in one forward pass: tensors (micro_batch_size, ...), most of them as long as a row.

    A row of k sequences gives (micro_batch_size * k, sequence_length), the first row's sequences first.
    Rows are shorter, and the same for all micro-batches of a step, where they are grouped by length.
    inputs: the model's, by the names of its forward. targets: the task's loss's, by the names of its parameters;
    `labels` are always among them, IGNORE_INDEX where nothing is trained.
    """

    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]

    def to(self, device: torch.device | str) -> MicroBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        return self._each(Tensor.pin_memory)

    def split(self, num_rows: int) -> list[MicroBatch]:
        """Views of at most so many rows each, where the first axis is one of rows and a row's sequences the second."""
        inputs, targets = _split(self.inputs, num_rows), _split(self.targets, num_rows)
        return [MicroBatch(*parts) for parts in zip(inputs, targets, strict=True)]

    @property
    def labels(self) -> Tensor:
        return self.targets["labels"]

    def _each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return MicroBatch(inputs, {name: change(tensor) for name, tensor in self.targets.items()})


class StepBatches:
    """The micro-batches of one data-parallel rank, one list per optimizer step; prepared ahead.

    A pure function of the step: step s reads the global positions [s * G, (s + 1) * G), G = batch.global_batch_size,
    whatever the shard and the micro-batch. No step reads a row twice while the data have G rows. shard: (data-parallel
    rank, data-parallel size); G must divide into them, which the configuration has checked. start_step, start_samples,
    anchor: where a run goes on; nothing before it is looked at. num_workers: processes that prepare the steps; 0: a
    thread of this one. They change nothing else.
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
        anchor: dict[str, int] | None = None,
        num_workers: int = 0,
    ):
        self.rows, self.seed, self.batch, self.shard = rows, seed, batch, shard
        self.num_steps, self.num_workers = num_steps, num_workers
        self.step = start_step
        given = start_step * batch.global_batch_size if start_samples is None else start_samples
        self._origin = given - start_step * batch.global_batch_size  # not 0 when the batch's size was another before
        self._steps = Steps.of(batch.global_batch_size, given, anchor)
        self.last_wait_seconds = 0.0
        rows.plan(seed, self._steps, num_steps, anchor or {})
        assert batch.global_batch_size % (batch.micro_batch_size * shard[1]) == 0

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks, this step's included."""
        return self._origin + self.step * self.batch.global_batch_size

    @property
    def anchor(self) -> dict[str, int]:
        """What the rows and their order need to go on from here, beside `samples`."""
        return self.rows.anchor(self.samples) | self._steps.history

    @property
    def num_inputs(self) -> int:
        """Tokens that all ranks read in this step, trained or not, without padding."""
        return self.rows.num_inputs(self.rows_of(self.step - 1))

    @property
    def epoch(self) -> float:
        """Passes over the rows, as a fraction."""
        return self.samples / len(self.rows)

    def at(self, step: int) -> list[MicroBatch]:
        """The micro-batches that this rank reads in the given 0-based step."""
        return self._whole(step).split(self.batch.micro_batch_size)

    def _whole(self, step: int) -> MicroBatch:
        """This rank's rows of a step, not cut yet: few large tensors go from one process to another, not many small."""
        rank, size = self.shard
        together = self.rows_of(step)
        found, allowed = self.rows.most_reads(together)
        assert found <= allowed, f"step {step} reads a row {found} times, {allowed} at most are needed"
        own, positions = (np.split(array, size)[rank] for array in (together, self._positions(step)))
        return _whole(self.rows.drawn(own, positions, self.seed), self.rows.width(together))

    def rows_of(self, step: int) -> np.ndarray:
        """int64 (global_batch_size,): the rows that all ranks together read in the given 0-based step."""
        return self.rows.at_positions(self._positions(step), self.seed, self._steps)

    def _positions(self, step: int) -> np.ndarray:
        start = self._origin + step * self.batch.global_batch_size
        return np.arange(start, start + self.batch.global_batch_size)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """From `step` on, counting it up; `last_wait_seconds` says how long the list just handed out took to come."""
        with closing(self._by_workers() if self.num_workers else self._by_thread()) as prepared:
            while True:
                began = time.perf_counter()
                with record_function(DATA_WAIT):
                    whole = next(prepared, None)
                if whole is None:
                    return
                self.last_wait_seconds = time.perf_counter() - began
                self.step += 1
                yield whole.split(self.batch.micro_batch_size)

    def _by_thread(self) -> Iterator[MicroBatch]:
        upcoming = iter(range(self.step, self.num_steps))

        def make(step: int) -> MicroBatch:
            return _pinned(self._whole(step))

        with ThreadPoolExecutor(1, thread_name_prefix="step-batches") as pool:
            pending = deque(pool.submit(make, step) for step in islice(upcoming, _PREFETCHED_STEPS))
            while pending:
                whole = pending.popleft().result()
                pending.extend(pool.submit(make, step) for step in islice(upcoming, 1))
                yield whole

    def _by_workers(self) -> Iterator[MicroBatch]:
        """Each worker prepares whole steps, and PyTorch's loader hands them out in their order."""
        yield from DataLoader(
            _Steps(self._whole),
            batch_size=None,
            sampler=range(self.step, self.num_steps),
            num_workers=self.num_workers,
            prefetch_factor=_PREFETCHED_STEPS,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=init_worker,
            # spawned ones would be sent a copy of all tokens; forked ones share the pages of the file
            multiprocessing_context="fork",
            # without one of its own it would draw from the generator that dropout draws from
            generator=torch.Generator(),
        )


@dataclass(frozen=True)
class _Steps(Dataset):
    """What a worker asks for a step."""

    make: Callable[[int], MicroBatch]

    def __getitem__(self, step: int) -> MicroBatch:
        return self.make(step)


class EvaluationBatches(Sequence[MicroBatch]):
    """Every row exactly once over all shards, in order; the same number of micro-batches on each shard.

    What is missing to fill the last ones is a copy of the first row with nothing to train. Made when asked for:
    held-out data may be large. alive: called for each, which says that a long evaluation gets on.
    """

    def __init__(
        self, rows: Rows, micro_batch_size: int, shard: tuple[int, int], alive: Callable[[], None] = lambda: None
    ):
        self.rows, self.micro_batch_size, self.shard = rows, micro_batch_size, shard
        self._alive = alive

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.micro_batch_size * self.shard[1]))

    def __getitem__(self, index: int) -> MicroBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._alive()
        first = (self.shard[0] * len(self) + index) * self.micro_batch_size
        indices = np.arange(first, first + self.micro_batch_size)
        exists = indices < len(self.rows)
        rows = np.where(exists, indices, 0)
        found = self.rows[rows]
        labels = found.labels.copy()
        labels[~exists] = IGNORE_INDEX
        arrays = RowArrays(found.inputs, found.targets | {"labels": labels})
        (micro_batch,) = _pinned(_whole(arrays, self.rows.width(rows))).split(self.micro_batch_size)
        return micro_batch


def _whole(rows: RowArrays, width: int) -> MicroBatch:
    return MicroBatch(_tensors(rows.inputs, width), _tensors(rows.targets, width))


def _tensors(arrays: dict[str, np.ndarray], width: int) -> dict[str, Tensor]:
    cut = {name: array[..., :width] if array.ndim > 1 else array for name, array in arrays.items()}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in cut.items()}


def _pinned(whole: MicroBatch) -> MicroBatch:
    """Where a GPU copies it from memory by itself, while it computes."""
    return whole.pin_memory() if torch.cuda.is_available() else whole


def _split(tensors: dict[str, Tensor], num_rows: int) -> list[dict[str, Tensor]]:
    parts = {name: tensor.split(num_rows) for name, tensor in tensors.items()}
    return [
        {name: part.flatten(0, 1) if part.ndim == 3 else part for name, part in zip(parts, together, strict=True)}
        for together in zip(*parts.values(), strict=True)
    ]
