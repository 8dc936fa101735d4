"""The commit protocol on a real disk: threads as ranks, processes that are killed, checkpoints that were damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from samecurve.checkpoint import commit as protocol
from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    check_files,
    check_records,
    file_name,
    list_checkpoints,
    read_manifest,
)
from samecurve.errors import StorageError
from samecurve.storage.filesystem import PIECE_BYTES, LocalFileSystem

ROOT = Path(__file__).parents[2]
DISK = LocalFileSystem()
RANK_1 = file_name(1)
PHASES = [f"save.{name}" for name in "prepare write fsync agree manifest marker rename renamed rotate".split()]


def save(directories: list[Path], step: int, bug: Exception | None = None) -> list[BaseException | None]:
    """One commit by as many ranks as directories. Returns each rank's error. bug: raised by the last one's `write`."""
    barrier, values = Barrier(len(directories)), [None] * len(directories)

    def job(rank: int) -> None:
        def conclude(value, conclusion):
            values[rank] = value
            barrier.wait(10)
            if rank == 0:
                values[0] = conclusion(list(values))
            barrier.wait(10)
            verdict = values[0]
            barrier.wait(10)
            return verdict

        def write(folder: Path):
            if bug and rank == len(directories) - 1:
                raise bug
            return [protocol.write_file(DISK, folder / file_name(rank), [b"head", f"{rank} {step}".encode()])], rank

        small_files = lambda notes: {"state.json": json.dumps(notes).encode()}  # noqa: E731
        content = protocol.Content(step, 100, write, small_files)
        protocol.commit(DISK, directories[rank], content, conclude, rank)

    with ThreadPoolExecutor(len(directories)) as ranks:
        return [future.exception(20) for future in [ranks.submit(job, rank) for rank in range(len(directories))]]


@pytest.fixture
def checkpoint(tmp_path):
    assert save([tmp_path / "checkpoints"] * 2, 40) == [None, None]
    return tmp_path / "checkpoints" / "step_00000040"


def test_what_is_written(checkpoint):
    assert {path.name for path in checkpoint.iterdir()} == {file_name(0), RANK_1, "state.json", MANIFEST, MARKER}
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    assert (manifest["step"], manifest["world_size"]) == (40, 2)
    sha256 = hashlib.sha256(b"head1 40").hexdigest()
    assert {"name": RANK_1, "size": 8, "sha256": sha256} in manifest["files"]
    assert (checkpoint / RANK_1).read_bytes() == b"head1 40" and (checkpoint / "state.json").read_bytes() == b"[0, 1]"
    digest, files = read_manifest(DISK, checkpoint)
    assert digest == json.loads((checkpoint / MARKER).read_text())["manifest_sha256"]
    assert [record.name for record in files] == [file_name(0), RANK_1, "state.json"]
    assert list_checkpoints(DISK, checkpoint.parent) == [checkpoint] and check_files(DISK, checkpoint) == []


def test_a_file_of_many_pieces(tmp_path):
    data = bytes(range(251)) * (2 * PIECE_BYTES // 251 + 1)
    record = protocol.write_file(DISK, tmp_path / "f", [b"head", memoryview(data).cast("B"), b""])
    assert (tmp_path / "f").read_bytes() == b"head" + data
    assert record == ("f", 4 + len(data), hashlib.sha256(b"head" + data).hexdigest())


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [file_name(0), RANK_1, "state.json", MANIFEST, MARKER])
@pytest.mark.parametrize(
    "damage",
    [flip, Path.unlink, replace_by_folder, lambda path: os.truncate(path, 0), lambda path: os.truncate(path, 3)],
)
def test_every_damage_of_every_file_is_found(checkpoint, name, damage):
    damage(checkpoint / name)
    problems = check_files(DISK, checkpoint)
    assert [problem.file for problem in problems] == [name]
    assert problems[0].expected and problems[0].actual and str(problems[0]).startswith(problems[0].file)


def test_some_of_the_files_are_checked(checkpoint):
    flip(checkpoint / RANK_1)
    _, files = read_manifest(DISK, checkpoint)
    assert check_records(DISK, checkpoint, files[::2]) == [] and check_files(DISK, checkpoint, small_only=True) == []
    assert [problem.file for problem in check_records(DISK, checkpoint, files[1:])] == [RANK_1]
    os.truncate(checkpoint / RANK_1, 3)
    assert [problem.file for problem in check_files(DISK, checkpoint, small_only=True)] == [RANK_1]
    flip(checkpoint / "state.json")
    assert len(check_files(DISK, checkpoint, small_only=True)) == 2


HOSTILE = {
    "a path": lambda m: m["files"].append(m["files"][0] | {"name": "../../secret"}),
    "an absolute path": lambda m: m["files"].append(m["files"][0] | {"name": "/etc/passwd"}),
    "a path of Windows": lambda m: m["files"].append(m["files"][0] | {"name": "..\\secret"}),
    "the folder itself": lambda m: m["files"].append(m["files"][0] | {"name": "."}),
    "no name": lambda m: m["files"].append(m["files"][0] | {"name": ""}),
    "a NUL": lambda m: m["files"].append(m["files"][0] | {"name": "a\0b"}),
    "a number as name": lambda m: m["files"][0].update(name=3),
    "a text as size": lambda m: m["files"][0].update(size="8"),
    "true as size": lambda m: m["files"][0].update(size=True),
    "no sha256": lambda m: m["files"][0].pop("sha256"),
    "a list as file": lambda m: m["files"].append([]),
    "no files": lambda m: m.pop("files"),
    "a text as step": lambda m: m.update(step="40"),
    "no world size": lambda m: m.pop("world_size"),
    "world size 0": lambda m: m.update(world_size=0),
    "more ranks than files": lambda m: m.update(world_size=10**12),
    "a rank without its file": lambda m: m.update(files=[f for f in m["files"] if f["name"] != RANK_1]),
    "a file twice": lambda m: m["files"].append(m["files"][0]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_that_somebody_made_is_not_believed(checkpoint, change):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    change(manifest)
    seal(checkpoint, json.dumps(manifest).encode())
    assert [problem.file for problem in check_files(DISK, checkpoint)] == [MANIFEST]


@pytest.mark.parametrize("text", [b"[]", b"\xff", b"[" * 100_000, b"{"])
def test_a_manifest_that_is_no_object(checkpoint, text):
    seal(checkpoint, text)
    assert [problem.file for problem in check_files(DISK, checkpoint)] == [MANIFEST]


def test_another_manifest_than_the_marked_one(checkpoint):
    (checkpoint / MANIFEST).write_bytes((checkpoint / MANIFEST).read_bytes() + b" ")
    [problem] = check_files(DISK, checkpoint)
    assert problem.file == MANIFEST and problem.expected.startswith("sha256") and MARKER in problem.expected


def seal(folder: Path, manifest: bytes) -> None:
    (folder / MANIFEST).write_bytes(manifest)
    (folder / MARKER).write_text(json.dumps({"manifest_sha256": hashlib.sha256(manifest).hexdigest()}))


def test_only_checkpoints_are_candidates_and_rotated(checkpoint):
    directory = checkpoint.parent
    others = ["step_7", "step_000000xx", "xstep_00000001", "other"]
    for name in others:
        (directory / name).mkdir()
    (directory / "step_00000050").write_text("a file")
    for step in (20, 10**9):
        assert save([directory] * 2, step) == [None, None]
    assert [path.name for path in list_checkpoints(DISK, directory)] == [
        "step_1000000000",
        "step_00000040",
        "step_00000020",
    ]
    assert protocol.rotate(DISK, directory, 1, {"step_00000020"}) == ""
    assert [path.name for path in list_checkpoints(DISK, directory)] == ["step_1000000000", "step_00000020"]
    assert all((directory / name).exists() for name in [*others, "step_00000050"])


def test_damaged_ones_are_kept_beside_the_good_ones(tmp_path):
    for step in range(10, 80, 10):
        assert save([tmp_path] * 2, step) == [None, None]
    for step in (20, 40, 50, 70):
        (tmp_path / f"step_{step:08d}" / RANK_1).unlink()
    assert protocol.rotate(DISK, tmp_path, 2, ()) == ""
    assert [path.name[-2:] for path in list_checkpoints(DISK, tmp_path)] == ["70", "60", "50", "30"]
    assert protocol.rotate(DISK, tmp_path, 0, ()) == ""
    assert [path.name[-2:] for path in list_checkpoints(DISK, tmp_path)] == ["70", "60"]


def test_a_bug_on_one_rank_ends_the_save_on_all(tmp_path):
    bug = ValueError("a bug")
    errors = save([tmp_path] * 2, 40, bug)
    assert [(type(error), str(error)) for error in errors] == [(StorageError, "rank 1: ValueError: a bug")] * 2
    assert errors[1].__cause__ is bug and list(tmp_path.iterdir()) == []


def test_an_output_dir_that_is_not_shared(tmp_path):
    directories = [tmp_path / "machine_0", tmp_path / "machine_1"]
    errors = save(directories, 40)
    assert all("rank 1" in str(error) and "the same folder on all machines" in str(error) for error in errors), errors
    (directories[1] / ".partial-step_00000040").mkdir(parents=True)
    errors = save(directories, 40)
    assert all(f"{RANK_1}: 8 bytes were written and rank 0 sees no such file" in str(e) for e in errors), errors
    assert type(errors[0]) is type(errors[1]) is StorageError and list(directories[0].iterdir()) == []


def test_a_folder_that_cannot_be_synced_is_no_error_but_a_failing_disk_is(tmp_path, monkeypatch):
    def fails(code):
        monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(code, os.strerror(code))))

    fails(errno.EINVAL)
    DISK.sync_folder(tmp_path)
    fails(errno.EIO)
    with pytest.raises(OSError):
        DISK.sync_folder(tmp_path)


PROGRAM = """
import sys
from pathlib import Path
from samecurve.checkpoint import commit
from samecurve.storage.filesystem import LocalFileSystem
fs, directory = LocalFileSystem(), Path(sys.argv[1])
for step in map(int, sys.argv[2:]):
    write = lambda folder: ([commit.write_file(fs, folder / "rank_00000.safetensors", [b"head", b"%d" % step])], None)
    try:
        content = commit.Content(step, 0, write, lambda notes: {"state.json": b"{}"})
        commit.commit(fs, directory, content, lambda value, conclusion: conclusion([value]), 0)
    except Exception as error:
        print(type(error).__name__, error)
    print(commit.rotate(fs, directory, 1, ()))
assert "torch" not in sys.modules
"""


def run(directory: Path, *steps: int, faults: str = "") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"SAMECURVE_FAULTS": faults} if faults else {})
    command = [sys.executable, "-c", PROGRAM, str(directory), *map(str, steps)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def left(directory: Path) -> list[str]:
    """The good ones; the others must not be there."""
    found = list_checkpoints(DISK, directory)
    assert all(check_files(DISK, folder) == [] for folder in found)
    return [folder.name[-2:] for folder in found]


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_process(tmp_path, phase):
    second = phase if phase == "save.rotate" else f"{phase}@2"
    ended = run(tmp_path, 20, 40, faults=f"{second}:0:kill")
    assert ended.returncode == -9, ended.stderr
    assert left(tmp_path) == (["40", "20"] if phase in ("save.renamed", "save.rotate") else ["20"])
    assert run(tmp_path, 60).returncode == 0
    assert left(tmp_path) == ["60"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_failing_disk(tmp_path, phase):
    second = phase if phase == "save.rotate" else f"{phase}@2"
    ended = run(tmp_path, 20, 40, 60, faults=f"{second}:0:enospc")
    assert ended.returncode == 0, ended.stderr
    assert "No space left on device" in ended.stdout
    assert (f"StorageError rank 0: {tmp_path}" in ended.stdout and "ENOSPC" in ended.stdout) or phase == "save.rotate"
    assert left(tmp_path) == ["60"] and len(list(tmp_path.iterdir())) == 1
