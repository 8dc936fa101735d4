"""Every operation of every save is interrupted in every way: what was committed is found again, whole.

The scenario: two ranks save after steps 20, 40, 60, 80 and keep 2. One fault happens, at each operation of each save in
turn; then the same session saves again, or a new one goes on from what is left of the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from fake_filesystem import FakeFileSystem
from harness import append_result, long
from two_ranks import DIRECTORY, ERRORS, KILL_ONE, STOP, Fault, Team, contents

from samecurve.checkpoint import commit as protocol
from samecurve.checkpoint.manifest import MANIFEST, MARKER, check_files, file_name, list_checkpoints, step_of
from samecurve.errors import StorageError

STEPS = (20, 40, 60, 80)
ORDERS = ((0, 1), (1, 0))
FAULTS = (KILL_ONE, STOP, *ERRORS)
PHASES = {f"save.{name}" for name in "prepare write fsync agree manifest marker rename renamed".split()}
NOT_OURS = {"best.json": b"{}", "step_7/notes": b"mine", "step_by_step/notes": b"mine"}
LAST_ATTEMPT = 3


class Battery:
    """One save, `step`, after those before it; interrupted at each operation. Counts what it covered.

    damaged: there is a damaged checkpoint of `step` already, which the save replaces.
    changed: the attributes of Team that make it a wrong one.
    """

    def __init__(self, step: int, order: tuple[int, int] = (0, 1), keep: int = 2, damaged: bool = False, **changed):
        self.step, self.order, self.keep, self.changed = step, order, keep, changed
        self.damaged = damaged
        self.num_cases = self.num_disks = self.num_raised = 0
        self.phases: set[str] = set()
        self._damage: dict[str, bytes] = {}
        self._judged: set[tuple] = set()
        self._begin = self._team(FakeFileSystem())
        self._not_ours = {} if step == STEPS[0] else NOT_OURS  # the first save makes the folder
        for name, data in {"../run.json": b"{}", **self._not_ours}.items():
            self._begin.disk.put(Path(os.path.normpath(DIRECTORY / name)), data)
        self.baseline: list[str] = []
        for earlier in [each for each in STEPS if each < step or damaged and each == step]:
            self.baseline += self._undisturbed(self._begin, earlier)
        if damaged:
            self._begin.committed.remove(step)
            self._begin.disk.put(DIRECTORY / f"step_{step:08d}" / file_name(1), b"other bytes")
            self._damage = self._begin.disk.files(DIRECTORY / f"step_{step:08d}")

    def violations(self, fault: Fault) -> Iterator[str]:
        yield from self.baseline
        team = self._restart()
        yield from self._undisturbed(team, self.step)
        for at, (rank, operation, path) in enumerate(team.operations):
            self.phases |= {path.name} if operation == "fault_point" else set()
            if not fault.can_hit(operation):
                continue
            self.num_cases += 1
            found = self._after_error(fault, at) if fault.error else self._after_death(fault, at)
            case = f"step {self.step}, {fault.name} at operation {at} (rank {rank}: {operation} {path.name})"
            yield from (f"{case}: {text}" for text in found)

    def two_faults(self) -> Iterator[str]:
        """All are killed just after a rename; the next session's save meets a power cut at each operation."""
        yield from self.baseline
        team = self._restart()
        yield from self._undisturbed(team, self.step)
        renames = [at for at, (_, operation, _) in enumerate(team.operations) if operation == "rename"]
        for first in renames:
            at = 0
            while True:
                team = self._restart()
                team.save(self.step, fault=STOP, at=first + 1)
                later = self._team(team.disk)
                later.committed = list(team.committed)
                saved = later.save(self.step + 20, attempt=2, fault=STOP, at=at)
                if saved.good:
                    break
                self.num_cases += 1
                case = f"step {self.step}, killed after operation {first}, then a power cut at operation {at}"
                yield from (f"{case}: {text}" for text in self._power_cut(later))
                at += 1

    def _after_death(self, fault: Fault, at: int) -> Iterator[str]:
        team = self._restart()
        team.save(self.step, fault=fault, at=at)
        if fault is STOP:
            yield from self._power_cut(team)
        yield from self._judge(team.disk, team.committed)
        yield from self._new_session(team.disk, team.committed)

    def _power_cut(self, team: Team) -> Iterator[str]:
        for left, disk in team.disk.after_power_cut():
            self.num_disks += 1
            state = (disk.state(), tuple(team.committed))
            if state not in self._judged:
                self._judged.add(state)
                found = [*self._judge(disk, team.committed), *self._new_session(disk, team.committed)]
                yield from (f"power cut, {left}: {text}" for text in found)

    def _after_error(self, fault: Fault, at: int) -> Iterator[str]:
        team = self._restart()
        saved = team.save(self.step, fault=fault, at=at)
        raised = [error for error in saved.errors if error is not None]
        if raised:
            self.num_raised += 1
            if len(raised) < 2 or not all(type(error) is StorageError for error in raised):
                yield f"not all ranks raised a StorageError: {saved.errors}"
            elif len(set(map(str, raised))) > 1 or errno.errorcode[fault.error] not in str(raised[0]):
                yield f"the errors are not one that names the errno: {raised}"
        yield from self._judge(team.disk, team.committed)
        for left, disk in team.disk.after_power_cut():
            yield from (f"then a power cut, {left}: {text}" for text in self._judge(disk, team.committed))
        if raised:
            yield from self._undisturbed(team, self.step, attempt=2)
        yield from self._undisturbed(team, self.step + 20)
        yield from self._new_session(team.disk, team.committed)

    def _undisturbed(self, team: Team, step: int, attempt: int = 1) -> Iterator[str]:
        saved = team.save(step, attempt)
        team.operations = saved.operations
        if not saved.good:
            yield f"a save of step {step} with nothing in its way failed: {saved.errors} {saved.rotated}"
        yield from self._judge(team.disk, team.committed)
        yield from self._tidy(team.disk)

    def _new_session(self, disk: FakeFileSystem, committed: list[int]) -> Iterator[str]:
        team = self._team(disk)
        team.committed = list(committed)
        newest = next(
            (step_of(folder) for folder in list_checkpoints(disk, DIRECTORY) if not check_files(disk, folder)), 0
        )
        found = list(self._undisturbed(team, newest + 20, attempt=LAST_ATTEMPT))
        for _, left in disk.after_power_cut():
            found += [f"then a power cut: {text}" for text in self._judge(left, team.committed)]
            break
        yield from (f"a new session: {text}" for text in found)

    def _judge(self, disk: FakeFileSystem, committed: list[int]) -> Iterator[str]:
        good = []
        for folder in list_checkpoints(disk, DIRECTORY):
            problems, files = check_files(disk, folder), disk.files(folder)
            if problems and files != self._damage:
                yield f"{folder.name} is there and damaged: {problems[0]}"
            elif not problems:
                good.append(step_of(folder))
                own = {name: data for name, data in files.items() if name not in (MANIFEST, MARKER)}
                if own not in [contents(good[-1], attempt + 1) for attempt in range(LAST_ATTEMPT)]:
                    yield f"{folder.name} is good, but holds no save's content: {own}"
        if max(committed, default=0) > max(good, default=0):
            yield f"step {max(committed)} was committed, but the good ones are {good}"

    def _tidy(self, disk: FakeFileSystem) -> Iterator[str]:
        names = disk.names(DIRECTORY)
        if any(name.startswith(".") for name in names):
            yield f"debris is left: {sorted(names)}"
        if len(list_checkpoints(disk, DIRECTORY)) > self.keep + bool(self._damage):
            yield f"more than {self.keep} are kept: {sorted(names)}"
        if not {Path(name).parts[0] for name in self._not_ours} <= names:
            yield f"something that is not ours is gone: {sorted(names)}"

    def _restart(self) -> Team:
        team = self._team(self._begin.disk.copy())
        team.committed = list(self._begin.committed)
        return team

    def _team(self, disk: FakeFileSystem) -> Team:
        team = Team(disk, self.order, self.keep)
        for name, value in self.changed.items():
            setattr(team, name, value)
        return team


def shown(violations: list[str]) -> str:
    return f"{len(violations)} violations, the first:\n" + "\n".join(violations[:5])


NUM_CASES = {"one rank": 62, "all": 62, "ENOSPC": 38, "EIO": 54}  # of each save, at least


# every day the save that makes the folder and the first one that removes another
SAVES = [*product(STEPS[::2], ORDERS[:1])]
SAVES += long(*(save for save in product(STEPS, ORDERS) if save not in SAVES))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize(("step", "order"), SAVES)
def test_every_operation(step, order, fault):
    battery = Battery(step, order)
    found = list(battery.violations(fault))
    record(battery, fault.name, found)
    assert not found, shown(found)
    assert_covered(battery, fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("scenario", [{"keep": 1}, {"damaged": True}], ids=["keep 1", "in place of a damaged one"])
def test_other_scenarios(scenario, fault):
    battery = Battery(60, **scenario)
    found = list(battery.violations(fault))
    record(battery, fault.name, found)
    assert not found, shown(found)
    assert_covered(battery, fault)


@pytest.mark.parametrize("step", [60, *long(20, 40, 80)])
def test_a_power_cut_after_a_kill(step):
    battery = Battery(step)
    found = list(battery.two_faults())
    record(battery, "a kill, then a power cut", found)
    assert not found, shown(found)
    assert battery.num_cases >= 62 and battery.num_disks > 500, (battery.num_cases, battery.num_disks)


def record(battery: Battery, fault: str, found: list[str]) -> None:
    append_result({"kind": "unit", "fault": fault, "cases": battery.num_cases, "violations": len(found)})


def assert_covered(battery: Battery, fault: Fault) -> None:
    expected = next(number for name, number in NUM_CASES.items() if fault.name.startswith(name))
    assert battery.num_cases >= expected, battery.num_cases
    if fault is STOP:
        assert battery.num_disks > 500, battery.num_disks
    if fault.error:
        assert battery.num_raised >= 38, battery.num_raised
    rotates = {"save.rotate"} if battery.step > battery.keep * 20 and not battery.damaged else set()
    assert battery.phases == PHASES | rotates


def names(*wanted: str):
    """Syncs of files with such a name."""
    return lambda phase, operation, path: operation == "sync" and path.name.startswith(wanted)


def folder(wanted: str, *phases: str):
    """Syncs of this folder, after one of these phases was reached."""
    return lambda phase, operation, path: (
        operation == "sync_folder" and path.name.startswith(wanted) and (not phases or phase in phases)
    )


WRONG = {
    "rank files are not synced": {"ignores": names("rank_")},
    "rank files are not synced at their end": {
        "ignores": lambda phase, operation, path: phase == "save.fsync" and names("rank_")(phase, operation, path)
    },
    "state.json is not synced": {"ignores": names("state.json")},
    "the manifest is not synced": {"ignores": names(MANIFEST)},
    "the marker is not synced": {"ignores": names(MARKER)},
    "the checkpoint's folder is not synced": {"ignores": folder(".partial-")},
    "the parent folder is not synced after the rename": {"ignores": folder("checkpoints", "save.renamed")},
    "the parent folder is not synced before old ones are removed": {"ignores": folder("checkpoints", "save.rotate")},
    "the new parent folder's own name is not synced": {"ignores": folder("run"), "step": 20},
    "rank 0 does not wait for the others": {"hasty": True, "pauses": "save.fsync", "order": (1, 0)},
    "rotation before the commit": {"rotates_early": True, "keep": 1},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_the_battery_finds_a_wrong_protocol(wrong):
    battery = Battery(**{"step": 60, **wrong})
    assert battery.baseline == [], "it has to work as long as nothing happens: " + shown(battery.baseline)
    found = list(battery.violations(STOP))
    assert found and "operation" in found[0], found[:1]


def test_the_battery_finds_a_rename_before_the_marker():
    digests, write_marker, publish = [], protocol._write_marker, protocol._publish

    def publish_first(fs, partial, final):
        publish(fs, partial, final)
        write_marker(fs, final, digests.pop())
        fs.sync_folder(final)

    with (
        mock.patch.object(protocol, "_write_marker", lambda fs, folder, digest: digests.append(digest)),
        mock.patch.object(protocol, "_publish", publish_first),
    ):
        assert list(Battery(60).violations(STOP))


def test_the_battery_finds_a_sweep_that_does_not_sync():
    """What an earlier session moved aside and did not sync: only a power cut in the next one shows it."""
    wrong = Battery(60, ignores=folder("checkpoints", "save.prepare", "save.rotate"))
    later = Battery(60, ignores=folder("checkpoints", "save.prepare"))
    assert list(wrong.two_faults()) and list(later.two_faults())


def test_a_pause_of_one_rank_changes_nothing():
    assert list(Battery(60, (1, 0), pauses="save.fsync").violations(STOP)) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written():
    team = Team(FakeFileSystem())
    team.disk.put(DIRECTORY / "best.json", b"{}")
    team.disk.capacity = 12_000_000
    saved = team.save(20)
    needed = sum(len(contents(20, 1)[file_name(rank)]) for rank in (0, 1)) + protocol.SPARE_BYTES
    text = f"{DIRECTORY}: the next checkpoint needs {needed / 1e9:.3f} GB, but 0.012 GB are free"
    assert [type(error) for error in saved.errors] == [StorageError] * 2
    assert all(text in str(error) for error in saved.errors), saved.errors
    assert not {operation for _, operation, _ in saved.operations} & {"make_folder", "create", "write"}
