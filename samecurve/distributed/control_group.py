"""Communication between ranks outside training: small objects, on the CPU, in process groups of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future

from samecurve.errors import SamecurveError

# The watchdog ends an operation that a rank never joins (watchdog.timeout_seconds), and this timeout only has to exceed
# the watchdog's. It alone limits the creation of the first group, before ranks see each other's heartbeats.
TIMEOUT = timedelta(hours=24)
ARRIVE_SECONDS = 5.0  # for all ranks to meet the error that one of them met
_LAZY = "TORCH_GLOO_LAZY_INIT"

T = TypeVar("T")


def lengthen_default_timeouts() -> None:
    """Make TIMEOUT the default of every process group that is created from now on.

    DeepSpeed's and HSDP's groups are created with torch's default: 10 minutes with NCCL, which then aborts the process
    without stacks or an exit code of ours, also while a large model is still being read. There is no public setting.
    """
    distributed_c10d._get_default_timeout = lambda backend: TIMEOUT


@contextmanager
def _lazy_connections() -> Iterator[None]:
    """Let gloo groups that are created in the body connect two ranks only when one has a message for the other.

    By default every rank connects to every other one and asks rank 0's store for all addresses, which is O(N^2) in all
    (benchmarks/scale.md). ProcessGroupGloo reads the variable whenever it creates a device.
    """
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY]
        if before is not None:
            os.environ[_LAZY] = before


def _are_set(store: dist.Store, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # torch's DistStoreError
        return False
    return True


class ControlGroup:
    """A gloo process group of all ranks; each instance has its own. timeout: of an operation; None: torch's default.

    Construction is collective and follows torch.distributed's initialization. With a single process, or for this one
    `alone`, no group is created and every operation returns at once.

    The bytes that a rank sends in an operation do not depend on the number of ranks; rank 0 alone handles a message of
    each rank in `conclude`. There is no all-gather, which is O(N^2) bytes in all.
    """

    def __init__(self, alone: bool = False, timeout: timedelta | None = TIMEOUT) -> None:
        alone = alone or not dist.is_initialized() or dist.get_world_size() == 1
        self.size = 1 if alone else dist.get_world_size()
        self.rank = 0 if alone else dist.get_rank()
        with _lazy_connections():
            self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=timeout)
        self._timeout = timeout

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks. Collective."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's one of rank 0's `values`, which are in rank order; other ranks pass None. Collective."""
        if self._group is None:
            assert values is not None
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values, src=0, group=self._group)
        return own[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 and return its result on all ranks. Collective.

        Raises:
            SamecurveError: `work` raised it; raised on all ranks.
        """
        result: Any = None
        error: SamecurveError | None = None
        if self.is_main:
            try:
                result = work()
            except SamecurveError as caught:
                error = caught
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result

    def conclude(self, value: Any, conclusion: Callable[[list[Any]], T]) -> T:
        """Return, on all ranks, what rank 0 concludes from one value per rank. Collective; also a barrier.

        Args:
            value: this rank's.
            conclusion: called on rank 0 with all ranks' values, in rank order. If it raises, the other ranks wait.
        """
        values = self._gather(value)
        concluded: Any = conclusion(values) if self.is_main else None
        return self.broadcast(concluded)

    def gather_scatter(self, value: Any, answers: Callable[[list[Any]], list[T]]) -> T:
        """Return to each rank its own one of the answers that rank 0 has to one value per rank. Collective.

        Args:
            value: this rank's.
            answers: called on rank 0 with all ranks' values; returns as many answers, both in rank order.

        Raises:
            SamecurveError: `answers` raised it; raised on all ranks.
        """
        values, answers_by_rank = self._gather(value), []
        self.on_main(lambda: answers_by_rank.extend(answers(values)))
        return self.scatter(answers_by_rank if self.is_main else None)

    def start_sum(self, values: Sequence[int]) -> Future[list[Tensor]]:
        """Start to add up each value over the ranks, in the background. Collective.

        Returns:
            One tensor of the sums, int64 (values,) on the CPU.
        """
        return self._start_all_reduce(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.SUM)

    def all_arrive(self, place: str, late: float = 2 * ARRIVE_SECONDS) -> bool:
        """Whether every rank calls this for the same place within ARRIVE_SECONDS of rank 0.

        Not a collective: a rank that is there alone must not wait for others, which may be anywhere. Rank 0 decides, so
        that all ranks get one answer, yes or no.

        Args:
            late: seconds that the others wait for rank 0, which finds none of them afterwards.
        """
        if self.size == 1:
            return True
        store, answer = distributed_c10d._get_default_store(), f"samecurve/{place}"
        here = [f"{answer}/{rank}" for rank in range(self.size)]
        try:
            store.set(here[self.rank], "")
            if self.is_main:
                are_here = _are_set(store, here, ARRIVE_SECONDS)
                store.set(answer, "yes" if are_here else "no")
                return are_here
            if _are_set(store, [answer], late):
                return store.get(answer) == b"yes"
            store.delete_key(here[self.rank])  # or rank 0 would believe that all are there
        except RuntimeError:  # torch's DistStoreError: the rank that serves the store has ended
            pass
        return False

    def new(self) -> ControlGroup:
        """Create another group of the same ranks, for a thread that runs in parallel with training. Collective."""
        group = ControlGroup(timeout=self._timeout)
        # Connect now: ranks ask the launcher's store for addresses, and the last save may follow the launcher's death.
        group.conclude(None, len)
        return group

    def start_any(self, given: bool) -> Callable[[], bool]:
        """Start to find out whether any rank gives True, in the background. Collective.

        Returns:
            A function that waits for the answer.
        """
        answer = self._start_all_reduce(torch.tensor([given], dtype=torch.uint8), dist.ReduceOp.MAX)
        return lambda: bool(answer.wait()[0])

    def _start_all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Future[list[Tensor]]:
        if self._group is None:
            alone: Future[list[Tensor]] = Future()
            alone.set_result([values])
            return alone
        work = dist.all_reduce(values, op=op, group=self._group, async_op=True)
        assert work is not None
        return work.get_future()

    def _gather(self, value: Any) -> list[Any]:
        """Return all ranks' values on rank 0, and [] on the others."""
        # torch's gather_object would all-gather the sizes first
        if not self.is_main:
            dist.send_object_list([value], dst=0, group=self._group)
            return []
        values = [value]
        for rank in range(1, self.size):
            received: list[Any] = [None]
            dist.recv_object_list(received, src=rank, group=self._group)
            values += received
        return values


class StopVote:
    """Asks after every step whether any rank has a reason to stop, without waiting for the others.

    The answer for one step is read after the next step. The all-reduce has usually finished by then, and all ranks read
    the same answer after the same step, so they stop together.
    """

    def __init__(self, world: ControlGroup):
        self._world = world
        self._pending: Callable[[], bool] | None = None

    def reason(self, own: T | None, at_once: bool) -> T | None:
        """Return the reason of the lowest rank that has one, None if all go on. Collective.

        Args:
            own: this rank's reason, None if it has none; once it has one, later calls have to give one too.
            at_once: wait for the answer to this very question, since no later step will read it.
        """
        pending, self._pending = self._pending, None
        stops = pending is not None and pending()
        if not stops:
            self._pending = self._world.start_any(own is not None)
            stops = (at_once or self._world.size == 1) and self._pending()
        return self._world.conclude(own, lambda reasons: next(filter(None, reasons))) if stops else None

    def all_arrive(self, step: int) -> bool:
        """Whether every rank calls this for the same step, as if a step failed on all of them."""
        return self._world.all_arrive(f"failed/{step}")
