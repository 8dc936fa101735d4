"""Every kind of file of a real checkpoint, damaged in every way: it is named, and never gone on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from battery import SINGLE, Case, Expected, Record, write_result

from samecurve.checkpoint.manifest import check_files
from samecurve.checkpoint.resume import CheckpointSelector, read_state
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import CheckpointError
from samecurve.storage.filesystem import LocalFileSystem

FILES = ("rank_00000.safetensors", "rank_00001.safetensors", "state.json", "index.json", "manifest.json", "COMMITTED")
# these two are compared with each other, so either may be the one that is named
PAIR = {"manifest.json", "COMMITTED"}
PAGE = 4096


def _cut(keep: Callable[[int], int]) -> Callable[[Path, Path], None]:
    def damage(path: Path, _: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: keep(len(content))])

    return damage


def _flip(path: Path, _: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _zero_page(path: Path, _: Path) -> None:
    """What a disk gives back for a page that it lost."""
    content = bytearray(path.read_bytes())
    start = len(content) // 2 // PAGE * PAGE
    stop = min(start + PAGE, len(content))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "deleted": lambda path, _: path.unlink(),
    "empty": _cut(lambda size: 0),
    "half": _cut(lambda size: size // 2),
    "one byte short": _cut(lambda size: size - 1),
    "bit flipped": _flip,
    "page zeroed": _zero_page,
    "of another step": lambda path, other: shutil.copyfile(other, path) and None,
}


@pytest.fixture(scope="module")
def saved(battery) -> Path:
    return battery.golden(Case()).directory / "checkpoints"


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    """Three good checkpoints; the index is alike in all of a run's, so the oldest one's is another."""
    for step in (5, 10, 15):
        shutil.copytree(saved / f"step_{step:08d}", tmp_path / f"step_{step:08d}")
    return tmp_path


def selector(directory: Path, told: list[str]) -> CheckpointSelector:
    facts = read_state(directory.parent / directory.name / "step_00000005")
    return CheckpointSelector(directory, facts, ControlGroup(), told.append, LocalFileSystem())


def damage(directory: Path, step: int, name: str, how: str) -> Path:
    path = directory / f"step_{step:08d}" / name
    other = directory / "step_00000005" / name
    before = path.read_bytes()
    if how == "of another step" and other.read_bytes() == before:
        pytest.skip(f"{name} is alike in all steps of a run: the swap changes nothing")
    DAMAGES[how](path, other)
    assert not path.exists() or path.read_bytes() != before, "nothing was damaged"
    return path


@pytest.mark.parametrize(("name", "how"), list(product(FILES, DAMAGES)))
def test_damage_is_named_and_the_older_one_is_taken(name, how, directory):
    damage(directory, 15, name, how)
    problems = check_files(LocalFileSystem(), directory / "step_00000015")
    record = Record("-", 2, "-", "corruption", f"{name} {how}", corruption_accepted=not problems)
    write_result(record)
    assert len(problems) == 1
    assert problems[0].file == name or {problems[0].file, name} <= PAIR
    assert problems[0].expected and problems[0].actual and problems[0].expected != problems[0].actual
    told: list[str] = []
    assert selector(directory, told).select("auto") == directory / "step_00000010"
    assert f"step_00000015/{problems[0]}" in told[0]


def test_the_table_is_whole(saved):
    assert {path.name for path in (saved / "step_00000015").iterdir()} == {*FILES}


def test_every_byte_of_the_manifest_matters_and_many_others(saved, tmp_path):
    folder = tmp_path / "step_00000015"
    shutil.copytree(saved / folder.name, folder)
    num_flips = 0
    for name in FILES[2:]:
        content = (folder / name).read_bytes()
        for place in range(0, len(content), 1 if name in PAIR else 4):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            (folder / name).write_bytes(changed)
            assert check_files(LocalFileSystem(), folder, small_only=True), f"byte {place} of {name} may change"
            num_flips += 1
        (folder / name).write_bytes(content)
    assert num_flips > 1500 and not check_files(LocalFileSystem(), folder)


def test_when_all_are_damaged_each_is_listed(directory):
    damage(directory, 15, "rank_00001.safetensors", "bit flipped")
    damage(directory, 10, "COMMITTED", "deleted")
    first = directory / "step_00000005" / "state.json"
    told: list[str] = []
    facts = selector(directory, told)
    first.write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        facts.select("auto")
    text = str(caught.value)
    for file in ("step_00000015/rank_00001.safetensors: ", "step_00000010/COMMITTED: ", "step_00000005/state.json: "):
        assert text.count(file) == 1


def test_a_run_goes_on_from_the_older_one_and_says_why(battery):
    victim = battery.victim(SINGLE)
    victim.hurt("kill", "SIGKILL of a single process", Expected(None, "", 15, "running"), faults="step@18:0:kill")
    rank = damage(victim.directory / "checkpoints", 15, "rank_00000.safetensors", "bit flipped")
    run = victim.finish()
    assert run.facts["start_step"] == 10
    assert run.output.count("step_00000015/rank_00000.safetensors: expected sha256") == 1
    moved = victim.directory / "previous"
    assert [path.name for path in moved.glob("*/checkpoints/*")] == [rank.parent.name]


def test_a_run_without_a_good_one_ends_and_leaves_all_as_it_is(battery):
    victim = battery.victim(SINGLE)
    victim.hurt("kill", "SIGKILL of a single process", Expected(None, "", 10, "running"), faults="step@13:0:kill")
    directory = victim.directory / "checkpoints"
    damage(directory, 10, "rank_00000.safetensors", "half")
    damage(directory, 5, "index.json", "page zeroed")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    started = victim.start()
    started.wait()
    assert started.process.returncode == 4, started.output
    assert started.output.count("CheckpointError (exit code 4)") == 1
    error = started.output.split("CheckpointError (exit code 4)")[1]
    for name in ("step_00000010/rank_00000.safetensors: ", "step_00000005/index.json: "):
        assert error.count(name) == 1, started.output
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
