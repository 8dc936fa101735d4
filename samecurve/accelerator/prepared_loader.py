"""A loader of this process's rows of each global batch, with an exact position and a count of each optimizer step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS, DataLoaderShard
from accelerate.logging import get_logger
from accelerate.utils import RNGType, send_to_device, synchronize_rng_states
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from samecurve.distributed.control_group import ControlGroup

logger = get_logger(__name__)

_REPLACED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")  # by GlobalBatches


@dataclass(frozen=True)
class Units:
    """Units that a script's loss is a mean over: rows, or labels.

    A mean loss times micro_batch * num_processes / step is this process's share of the mean over the optimizer step.

    Attributes:
        micro_batch: units of this process's part of the micro-batch; 0 if its only row is a copy of another part's.
        step: units of the optimizer step, over its micro-batches and all processes.
    """

    micro_batch: int
    step: int


class GlobalBatches(BatchSampler):
    """This process's rows of each global batch of an epoch: rank r of n reads rows b * r // n to b * (r + 1) // n of b.

    A process without a row reads the batch's first row as a copy. The order is a function of (seed, epoch): that of
    Accelerate's SeedableRandomSampler for shuffled data. A sampler of the user's own is asked by rank 0 alone, with the
    global generators of Python, NumPy and PyTorch seeded; it has to be a function of them and of `set_epoch`.

    Args:
        batches: the user's batch sampler, whose batches are the global ones.
        shard: (process index, number of processes).
        from_main: called on every process with a function, returns its result on rank 0. Collective.
    """

    def __init__(self, batches: Any, seed: int, shard: tuple[int, int], from_main: Callable[[Callable], Any]):
        self.known = type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, RandomSampler)
        if self.known:  # the user's sampler keeps its generator
            batches = BatchSampler(copy(batches.sampler), batches.batch_size, batches.drop_last)
        self.batches: Any = batches
        self.seed, self.shard, self._from_main = seed, shard, from_main
        # what Accelerate reads of a batch sampler; no process has fewer batches than another
        self.batch_size: Any = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)
        self.split_batches = self.even_batches = True
        self.sampler: Any = getattr(batches, "sampler", None)
        self._epoch: Any = batches
        self._start = self.total = 0
        self.sizes: deque[int] = deque()  # rows of the global batches that were read and not yet taken from here

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, epoch: int, start: int) -> int:
        """Make the next iteration that of an epoch from global batch `start`; return the batches of a whole epoch."""
        seed = (self.seed + epoch) % 2**63
        for sampler in (self.batches, self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if hasattr(sampler, "generator"):
                sampler.generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self._epoch = self.batches if self.known else self._from_main(lambda: _seeded_list(self.batches, seed))
        self._start = start
        self.sizes.clear()
        self.total = len(self._epoch)
        return self.total

    def rows_before(self, batch: int) -> int:
        """Return the rows of an epoch before a global batch; -1 if they are not known."""
        return min(batch * self.batch_size, len(self.sampler)) if self.known else -1

    def batches_before(self, rows: int) -> int:
        """Return the whole global batches in the first `rows` rows of an epoch."""
        return rows // self.batch_size

    def rows(self, size: int) -> list[int]:
        """Return the rows of each process in a global batch of `size` rows."""
        processes = self.shard[1]
        return [size * (rank + 1) // processes - size * rank // processes for rank in range(processes)]

    def __iter__(self) -> Iterator[list[int]]:
        rank, processes = self.shard
        for batch in islice(self._epoch, self._start, None):
            self.sizes.append(len(batch))
            yield batch[len(batch) * rank // processes : len(batch) * (rank + 1) // processes] or batch[:1]


def _seeded_list(batches: Any, seed: int) -> list[list[int]]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return [list(batch) for batch in batches]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass
class Position:
    """Place of a loader, shared with the loaders that skip batches of it.

    Attributes:
        epoch, start: epoch of the next iteration, and the global batch that it begins with.
        current: epoch and global batches handed out, of an iteration that goes on or that a training loop left.
        finished: the batches of this epoch up to the last finished optimizer step; None: the loop does not train.
        unfinished: batches handed out after `start` before the checkpoint, whose gradients are gone; None: none loaded.
    """

    epoch: int = 0
    start: int = 0
    current: tuple[int, int] | None = None
    unfinished: int | None = None
    finished: int | None = None

    def move(self, epoch: int, start: int = 0, current: tuple[int, int] | None = None, unfinished: int | None = None):
        self.epoch, self.start, self.current, self.unfinished = epoch, start, current, unfinished


@dataclass
class _Part:
    """A batch of this process, on the CPU, and the rows that each process has in the global batch."""

    batch: Any
    rows: list[int]
    units: int | None = None


class PreparedLoader(DataLoaderShard):
    """Accelerate's DataLoaderShard over GlobalBatches, with an exact position and a count of each optimizer step.

    The epoch advances when an iteration ends, and when a loop leaves it early. A look at the first batch
    (`next(iter(loader))`) without a backward pass leaves no trace.

    Args:
        accelerator: the PreparedData, whose `accumulate` counts micro-batches.
        loader: the user's loader.
        batches: rows of this process.
        device: where batches go; None leaves them on the CPU.
        count: returns the units of a batch, given its rows, too.
        world: adds them up over all processes.

    Attributes:
        trained: whether the current iteration, or the last one, has had a backward pass.
    """

    trained = False

    def __init__(
        self,
        accelerator: Any,
        loader: DataLoader,
        batches: GlobalBatches,
        device: Any,
        count: Callable[[Any, int], int],
        world: ControlGroup,
    ):
        self.accelerator, self.batches, self._count_batch, self._world = accelerator, batches, count, world
        self.position, self.skip, self.part = Position(), 0, _Part(None, [])
        self._units: Units | None = None  # of the current micro-batch
        self._counted_step: int | None = None  # of `accumulate`, in which it was counted; None: not counted yet
        self._is_repeated = False
        names = [name for name in _PYTORCH_DATALOADER_KWARGS if name not in _REPLACED and hasattr(loader, name)]
        options = {name: getattr(loader, name) for name in names}
        if isinstance(loader.sampler, BatchSampler):  # the dataset takes a list of indices and returns a batch
            options |= {"sampler": batches, "batch_size": None}
        else:
            options["batch_sampler"] = batches
        rng_types = [kind for kind in accelerator.rng_types or () if RNGType(kind) != RNGType.GENERATOR]
        options |= {"rng_types": rng_types or None, "_drop_last": loader.drop_last, "device": device}
        # a generator of its own: the loader would draw its workers' seeds from the one of dropout
        self._worker_seeds = torch.Generator()
        options |= {"_non_blocking": accelerator.non_blocking, "generator": self._worker_seeds}
        super().__init__(loader.dataset, **options)

    def __copy__(self) -> PreparedLoader:
        copied = PreparedLoader.__new__(PreparedLoader)
        copied.__dict__.update(self.__dict__)
        return copied

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.skip)

    @property
    def total_batch_size(self) -> int | None:
        return self.batches.batch_size

    @property
    def iteration(self) -> int:
        """Epoch of the current iteration, else of the next one."""
        return self.position.current[0] if self.position.current else self.position.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A position in another epoch that was loaded is dropped."""
        position = self.position
        if epoch != position.epoch:
            if position.start:
                logger.warning(
                    f"set_epoch({epoch}): the loaded checkpoint was taken in epoch {position.epoch} after "
                    f"{position.start} batches. This epoch begins with its first batch."
                )
            position.move(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types)
        position, (rank, processes) = self.position, self.batches.shard
        before = position.epoch, position.start, None, position.unfinished
        epoch, start = position.epoch, self.skip or position.start
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        total = self.batches.begin(epoch, start)
        self._worker_seeds.manual_seed((self.batches.seed + epoch * processes + rank) % 2**63)
        self._source, self._window_end, self.trained = iter(self.base_dataloader), -1, False
        self._ahead: deque[_Part] = deque()
        self._next, self._counts_units = start, True
        position.move(epoch + 1, 0, (epoch, start))
        # before the first backward pass: a script with an optimizer will train the batch in hand
        position.finished = start - self._unfinished() if self.accelerator._optimizers else None
        self.begin()
        try:
            for index in range(start, total):
                self._index = index
                self.part = self._ahead.popleft() if self._ahead else self._read()
                self._counted_step = None
                if index > start and not self.trained:
                    position.finished = None
                self.end_of_dataloader = index == total - 1
                current = position.current = (epoch, index + 1)
                batch = self.part.batch
                if self.device is not None:
                    batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
                yield batch
            position.current = None
        except GeneratorExit:
            self._drop_unfinished()
            if position.current is current and not self.trained:  # else a newer iteration has the position
                peeked = index == start
                position.move(*before) if peeked else position.move(epoch + 1)
            raise
        finally:
            self._source = iter(())
            self.end()

    def _drop_unfinished(self) -> None:
        """Forget the gradients of an optimizer step that a loop left in its middle: it had counted all of the step."""
        unfinished = self._unfinished()
        if not self.trained or not unfinished or self.gradient_state.active_dataloader is not self:
            return
        self.accelerator.step -= unfinished
        self.accelerator.drop_gradients()
        logger.warning(f"a loop ended within an optimizer step: the gradients of {unfinished} micro-batches are gone")

    def _read(self) -> _Part:
        batch = next(self._source)
        return _Part(batch, self.batches.rows(self.batches.sizes.popleft()))

    def _unfinished(self) -> int:
        """Return the micro-batches of the optimizer step that `accumulate` has begun and not ended."""
        accelerator = self.accelerator
        return 0 if accelerator.sync_gradients else accelerator.step % self.gradient_state.num_steps

    def note_backward(self) -> None:
        """Note that the batch in hand is trained: a checkpoint will begin behind it, or with its optimizer step."""
        self.trained, unfinished = True, self._unfinished()
        if not unfinished or self.position.finished is None:
            self.position.finished = self._index + 1 - unfinished

    def units(self) -> Units | None:
        """Count the units of the current micro-batch and its optimizer step. Collective at a step's first micro-batch.

        Reads the step's other micro-batches, as many as Accelerate's `accumulate` will take, unless it did already.

        Returns:
            None where micro-batches are not the loader's batches in turn: where a loop takes several of one batch, or
            reads a step's batches before it trains the first.
        """
        accelerator, num_steps = self.accelerator, self.gradient_state.num_steps
        self.note_backward()
        if accelerator.step != self._counted_step:
            done = accelerator.step % num_steps  # micro-batches of the step that `accumulate` has begun; 0: all
            self._is_repeated |= self._counted_step is not None and num_steps > 1  # once more for one batch
            begins = done == 1 % num_steps or not accelerator.accumulates
            self._check_turn(begins, num_steps)
            self._counted_step, self._next = accelerator.step, self._index + 1
            if self._counts_units and (self._index > self._window_end or done == 1 % num_steps):
                self._window_end = self._begin_window((-done) % num_steps)
            self._units = Units(self._count(self.part), self._step_units) if self._counts_units else None
        return self._units

    def _check_turn(self, begins: bool, num_steps: int) -> None:
        """Decide at a micro-batch, which may begin a step, whether the loader can tell the step's units."""
        skipped = self._index - self._next
        if begins:
            self._counts_units = num_steps == 1 or skipped != num_steps - 1  # all of a step's batches are read at once
        elif skipped:
            self._counts_units = False  # a step has other batches than were counted for it
        self._counts_units &= not self._is_repeated
        if not self._counts_units:
            logger.warning_once(
                "gradient accumulation takes other micro-batches than the loader's batches in turn (several of one "
                "batch, batches read ahead or left out): those of a step count alike, as in Accelerate. To weigh them "
                'by their units, give backward the sum of the losses with reduction="sum" and num_items'
            )

    def _begin_window(self, remaining: int) -> int:
        """Count the current micro-batch and `remaining` more into `_step_units`; return the last one's index."""
        state = self.gradient_state
        more = min(remaining, self.batches.total - 1 - self._index)
        while len(self._ahead) < more:
            self._ahead.append(self._read())
        parts = [self.part, *islice(self._ahead, more)]
        (units,) = self._world.start_sum([sum(map(self._count, parts))]).wait()
        self._step_units = int(units)
        whole = len(parts) if state.sync_with_dataloader else state.num_steps
        if len(parts) < whole and self.accelerator.step:
            logger.warning_once(
                "gradient accumulation goes on into the next epoch (sync_with_dataloader=False). The units of such a "
                "step are estimated from those of its batches that this epoch has."
            )
            self._step_units = round(self._step_units * whole / len(parts))
        return self._index + more

    def _count(self, part: _Part) -> int:
        if part.units is None:
            own = part.rows[self.batches.shard[0]]
            part.units = self._count_batch(part.batch, own) if own else 0
        return part.units

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the last finished optimizer step, valid on any number of processes.

        Returns:
            epoch, from 0; batches: global micro-batches consumed in it; rows: rows consumed in it, -1 with a batch
            sampler of the user's own; unfinished: micro-batches behind the position that were read, and not trained or
            for a step that is not finished; seed of the order.
        """
        position, batches = self.position, self.batches
        epoch, done, unfinished = position.epoch, position.start, position.unfinished or 0
        if position.current is not None:
            epoch, done = position.current
            unfinished = self._unfinished() if position.finished is None else done - position.finished
            # the end of an epoch is the next one's start
            more, done = divmod(done - unfinished, max(1, batches.total))
            epoch += more
        rows = batches.rows_before(done)
        return {"epoch": epoch, "batches": done, "rows": rows, "unfinished": unfinished, "seed": batches.seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on at a position of `state_dict`: the next iteration begins there."""
        batches, rows = self.batches, state_dict["rows"]
        start = batches.batches_before(rows) if rows >= 0 and batches.known else state_dict["batches"]
        again = rows - batches.rows_before(start)
        if rows >= 0 and again:
            logger.warning(
                f"the checkpoint was taken after {rows} rows, which is no multiple of the batch size "
                f"{batches.batch_size}: {again} rows are read again. Keep the batch size to avoid that."
            )
        batches.seed = state_dict["seed"]
        self.position.move(state_dict["epoch"], start, None, state_dict["unfinished"])
