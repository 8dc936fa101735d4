"""Two ranks that save checkpoints on a fake disk, one running at a time, and what can happen to them on the way."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, NamedTuple
from unittest import mock

from fake_filesystem import FakeFileSystem

from samecurve.checkpoint import commit as protocol
from samecurve.checkpoint.manifest import FileRecord, file_name

DIRECTORY = Path("/run/checkpoints")
WORLD_SIZE = 2
MESSAGES = ("gather", "verdict")
READS = ("folders", "exists", "size", "read", "free_bytes", *MESSAGES)


class Killed(BaseException):
    """The process is gone: nothing in it may react."""


class Rank:
    """A thread that runs only between `resume` and its next `hand_over`."""

    def __init__(self, job: Callable[[], None]):
        self.ended, self.given, self.error = False, None, None
        self._reply: Any = None
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        Thread(target=self._run, args=(job,), daemon=True).start()

    def resume(self, reply: Any = None) -> None:
        self._reply = reply
        self._go.release()
        self._stopped.acquire()

    def hand_over(self, given: Any) -> Any:
        self.given = given
        self._stopped.release()
        self._go.acquire()
        if isinstance(self._reply, BaseException):
            raise self._reply
        return self._reply

    def _run(self, job: Callable[[], None]) -> None:
        self._go.acquire()
        try:
            job()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()


class Fault(NamedTuple):
    """At one operation of a save. error: the errno, or 0 for what ends processes. lasting: from then on."""

    name: str
    error: int = 0
    everybody: bool = False
    lasting: bool = False

    def can_hit(self, operation: str) -> bool:
        if self.error == errno.ENOSPC:
            return operation not in (*READS, "unlink", "rmdir")
        return not self.error or operation not in MESSAGES

    def hits(self, operation: str, number: int, at: int) -> bool:
        return (number == at or self.lasting and number > at) and self.can_hit(operation)


KILL_ONE = Fault("one rank is killed")
STOP = Fault("all are killed", everybody=True)  # or the power is cut: what is left of the disk is the test's to say
ERRORS = (
    Fault("ENOSPC once", errno.ENOSPC),
    Fault("ENOSPC from there on", errno.ENOSPC, lasting=True),
    Fault("EIO once", errno.EIO),
    Fault("EIO from there on", errno.EIO, lasting=True),
)
_PAUSE = object()


class Saved(NamedTuple):
    """How a save went. errors: of each rank, None where commit returned. operations: (rank, operation, path)."""

    errors: list[BaseException | None]
    operations: list[tuple[int, str, Path]]
    rotated: str | None

    @property
    def good(self) -> bool:
        return self.errors == [None, None] and self.rotated == ""


class Team:
    """The ranks of one session.

    order: who runs first. keep: as for `rotate`. committed: the steps whose commit returned on rank 0.

    What makes it a wrong one: ignores(phase, operation, path): syncs that do nothing; phase: the last that was reached.
    hasty: rank 0 does not wait for rank 1's records and gives its own later; rank 1 stands still in `pauses` meanwhile.
    rotates_early: between the rename and the sync of the parent folder.
    """

    def __init__(self, disk: FakeFileSystem, order: tuple[int, int] = (0, 1), keep: int = 2):
        self.disk, self.order, self.keep = disk, order, keep
        self.committed: list[int] = []
        self.ignores: Callable[[str, str, Path], bool] = lambda phase, operation, path: False
        self.pauses, self.hasty, self.rotates_early = "", False, False

    def save(self, step: int, attempt: int = 1, fault: Fault | None = None, at: int = -1) -> Saved:
        """fault: happens instead of operation number `at`."""
        self._fault, self._at, self._phase = fault, at, ""
        self._operations: list[tuple[int, str, Path]] = []
        self._dead: set[int] = set()
        self._rotated: str | None = None
        self._ranks = [Rank(lambda rank=rank: self._job(rank, step, attempt)) for rank in range(WORLD_SIZE)]
        self.disk.before = self._before
        self.disk.ignores = lambda operation, path: self.ignores(self._phase, operation, path)
        small = mock.patch.object(protocol, "PIECE_BYTES", 20)  # so that a file is of several
        with mock.patch.object(protocol, "fault_point", self._reach), small:
            self._run()
        self.disk.before = lambda operation, path: None
        return Saved([rank.error for rank in self._ranks], self._operations, self._rotated)

    def _run(self) -> None:
        """Everyone runs up to a message; when all have come there, they get each other's values."""
        replies: list[Any] = [None] * WORLD_SIZE
        while not all(rank.ended for rank in self._ranks):
            for number in self.order:
                self._resume(number, replies[number])
            if self._ranks[1].given is _PAUSE:
                self._resume(1)
            replies = self._values()

    def _resume(self, number: int, reply: Any = None) -> None:
        self._current = number
        if not self._ranks[number].ended:
            self._ranks[number].resume(reply)

    def _values(self) -> list[Any]:
        if self._fault and self._fault.everybody and self._dead:
            return [Killed()] * WORLD_SIZE
        if any(rank.ended for rank in self._ranks):
            return [ConnectionError("a rank is gone")] * WORLD_SIZE
        return [[rank.given for rank in self._ranks]] * WORLD_SIZE

    def _job(self, rank: int, step: int, attempt: int) -> None:
        content = contents(step, attempt)

        def write(folder: Path) -> tuple[list, dict]:
            data = content[file_name(rank)]
            pieces = [data[:8], memoryview(data)[8:]]
            return [protocol.write_file(self.disk, folder / file_name(rank), pieces)], {"rank": rank}

        def small_files(notes: list[dict]) -> dict[str, bytes]:
            assert notes == [{"rank": 0}, {"rank": 1}]
            return {"state.json": content["state.json"]}

        part = protocol.Content(step, len(content[file_name(rank)]), write, small_files)
        protocol.commit(self.disk, DIRECTORY, part, self._conclude(rank, step, attempt), rank)
        if rank == 0:
            self.committed.append(step)
            self._rotated = protocol.rotate(self.disk, DIRECTORY, self.keep, ())

    def _conclude(self, rank: int, step: int, attempt: int) -> Callable[[Any, Callable[[list], Any]], Any]:
        num_calls = 0

        def conclude(value: Any, conclusion: Callable[[list], Any]) -> Any:
            nonlocal num_calls
            num_calls += 1
            self._before("gather", Path(str(num_calls)))
            verdict = None
            if self.hasty and rank == 0 and num_calls == 2:
                verdict = conclusion([value, _records_of_rank_1(step, attempt)])
                self._ranks[rank].hand_over(value)
            else:
                values = self._ranks[rank].hand_over(value)
                verdict = conclusion(values) if rank == 0 else None
            self._before("verdict", Path(str(num_calls)))
            return self._ranks[rank].hand_over(verdict)[0]

        return conclude

    def _reach(self, phase: str) -> None:
        self._phase = phase
        self._before("fault_point", Path(phase))
        if phase == self.pauses and self._current == 1:
            self._ranks[1].hand_over(_PAUSE)
        if self.rotates_early and phase == "save.renamed":
            protocol.rotate(self.disk, DIRECTORY, self.keep, ())

    def _before(self, operation: str, path: Path) -> None:
        fault, rank = self._fault, self._current
        if rank in self._dead or self._dead and fault.everybody:
            raise Killed
        number = len(self._operations)
        self._operations.append((rank, operation, path))
        if fault is None or not fault.hits(operation, number, self._at):
            return
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        self._dead.add(rank)
        raise Killed


def contents(step: int, attempt: int) -> dict[str, bytes]:
    """What the files of a checkpoint hold, but for the protocol's own; each save's are different."""
    text = f" of step {step}, attempt {attempt}".encode()
    return {name: name.encode() + text for name in (file_name(0), file_name(1), "state.json")}


def _records_of_rank_1(step: int, attempt: int) -> protocol._Outcome:
    """What rank 1 would give to rank 0 when it has written."""
    data = contents(step, attempt)[file_name(1)]
    record = FileRecord(file_name(1), len(data), hashlib.sha256(data).hexdigest())
    return protocol._Outcome(([record], {"rank": 1}))
