"""One live run per directory: what waits for the lock, and for how long."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from samecurve.errors import ConfigurationError, HangError
from samecurve.run.run_directory import RunDirectory
from samecurve.storage import file_lock as locking
from samecurve.storage.file_lock import DEAD_HOST_SECONDS, lock_folder, machine

HELD_SECONDS = 0.3


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Another open file holds the lock of tmp_path."""
    monkeypatch.setattr(locking, "POLL_SECONDS", 0.05)
    with lock_folder(tmp_path) as other:
        yield other


@pytest.fixture
def given_back(held):
    """After a moment."""
    timer = threading.Timer(HELD_SECONDS, held.close)
    timer.start()
    yield held
    timer.join()


def test_patience_outlives_a_lock_that_is_given_back(given_back, tmp_path):
    lock_folder(tmp_path, patience_seconds=10).close()
    assert given_back.closed


@pytest.mark.parametrize("patience_seconds", [0, 0.1])
def test_patience_ends(held, tmp_path, patience_seconds):
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=f"another run is writing into {tmp_path}"):
        lock_folder(tmp_path, patience_seconds)
    assert patience_seconds <= time.monotonic() - began < DEAD_HOST_SECONDS / 2


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_an_automatic_restart_waits_for_a_dead_hosts_lock(given_back, tmp_path, name, monkeypatch):
    monkeypatch.setenv(name, "1")
    RunDirectory(tmp_path).close()
    assert given_back.closed


def test_what_the_other_run_left_while_a_restart_waited_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    other = RunDirectory(tmp_path)
    other.begin()
    other.model.mkdir()
    (other.model / "config.json").write_text("{}")

    def end():
        other.status("done", exit_code=0)
        other.close()

    timer = threading.Timer(HELD_SECONDS, end)
    timer.start()
    assert RunDirectory(tmp_path).is_done
    timer.join()


def test_a_person_is_refused_at_once(held, tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(locking.time, "sleep", lambda _: pytest.fail("it waited"))
    with pytest.raises(ConfigurationError, match="another run is writing"):
        RunDirectory(tmp_path)


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def no_flock(request, monkeypatch):
    """A file system without flock, as Lustre without -o flock."""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(locking.fcntl, "flock", refuse)


def owner(folder: Path, **changes) -> Path:
    """The file of another process that has the folder."""
    path = folder / locking.OWNER
    own = {"machine": "another host", "pid": os.getpid(), "started": locking._started(os.getpid()), "id": "x"}
    path.write_text(json.dumps(own | changes))
    return path


def test_without_flock_a_second_run_is_refused_until_the_first_ends(no_flock, tmp_path):
    with lock_folder(tmp_path):
        with pytest.raises(ConfigurationError, match=rf"another run is writing.*process {os.getpid()} on") as refused:
            lock_folder(tmp_path)
        assert refused.value.exit_code == 2
    lock_folder(tmp_path).close()
    assert os.listdir(tmp_path) == [".lock"]


def test_without_flock_two_starts_at_once_get_one_lock(no_flock, tmp_path):
    owner(tmp_path, machine=machine(), pid=gone())

    def start(_):
        try:
            return lock_folder(tmp_path)
        except ConfigurationError:
            return None

    with ThreadPoolExecutor(8) as pool:
        locks = [lock for lock in pool.map(start, range(8)) if lock]
    assert len(locks) == 1
    locks[0].close()


def test_without_flock_a_claim_that_just_ended_takes_no_other_with_it(no_flock, tmp_path, monkeypatch):
    """Between two looks at the claim of a process that has finished, a third one may have made its own."""
    owner(tmp_path, machine=machine(), pid=gone())
    claim, age = tmp_path / f"{locking.OWNER}.claim", locking._age

    def slow(path: Path) -> float:
        claim.unlink(missing_ok=True)
        seconds = age(path)
        claim.write_text("of a third process")
        return seconds

    claim.write_text("of a process that finishes now")
    monkeypatch.setattr(locking, "_age", slow)
    with pytest.raises(ConfigurationError):
        lock_folder(tmp_path)
    assert claim.read_text() == "of a third process"


def gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("changes", "age", "is_free"),
    [
        ({}, 0, False),
        ({}, locking.STALE_SECONDS + 5, True),  # its host is gone
        ({"machine": machine()}, locking.STALE_SECONDS + 5, False),  # it lives, on slow storage
        ({"machine": machine(), "started": 5.0}, 0, True),  # its number belongs to another process
        ({"machine": machine(), "pid": "x"}, 0, False),
    ],
)
def test_without_flock_a_stale_owner_is_replaced(changes, age, is_free, no_flock, tmp_path):
    path = owner(tmp_path, **changes)
    os.utime(path, (time.time() - age,) * 2)
    if is_free:
        lock_folder(tmp_path).close()
    else:
        with pytest.raises(ConfigurationError):
            lock_folder(tmp_path)
        assert path.exists()


def test_without_flock_a_live_owner_touches_its_file(no_flock, tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.02)
    with lock_folder(tmp_path):
        os.utime(tmp_path / locking.OWNER, (5, 5))
        wait_until(lambda: (tmp_path / locking.OWNER).stat().st_mtime > 5)


def test_without_flock_a_file_that_somebody_deleted_returns(no_flock, tmp_path, monkeypatch):
    """Where os.utime is refused too."""
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(os, "utime", lambda *_: pytest.fail("some file systems have none"))
    with lock_folder(tmp_path):
        (tmp_path / locking.OWNER).unlink()
        wait_until((tmp_path / locking.OWNER).exists)
    assert not (tmp_path / locking.OWNER).exists()


@pytest.mark.parametrize("content", [b"\xff" * 5, b"{", b"[1]", b'{"machine": 3}', b"{}" * 500])
def test_without_flock_a_damaged_file_is_written_again(content, no_flock, tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.02)
    path, damaged = tmp_path / locking.OWNER, tmp_path / "damaged"

    def damage() -> None:  # at once: an empty file would be another owner's
        damaged.write_bytes(content)
        damaged.replace(path)

    with lock_folder(tmp_path):
        own = path.read_bytes()
        for _ in range(2):  # the thread lives on
            damage()
            wait_until(lambda: path.read_bytes() == own)
        monkeypatch.setattr(locking.OwnerFile, "_write", lambda self: None)
        time.sleep(0.1)
        damage()
    assert not path.exists()


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_so()


def test_without_flock_a_step_of_the_clock_ends_no_owner(no_flock, tmp_path, monkeypatch):
    with lock_folder(tmp_path):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: 5.0)  # computed from the time of booting
        with pytest.raises(ConfigurationError):
            lock_folder(tmp_path)


@pytest.mark.parametrize("beats", [False, True])
def test_without_flock_a_start_waits_for_an_owner_that_may_be_lost(beats, no_flock, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(locking, "POLL_SECONDS", 0.02)
    path = owner(tmp_path)
    last = time.time() - locking.STALE_SECONDS + 2
    os.utime(path, (last, last))
    if not beats:
        RunDirectory(tmp_path).close()
    else:
        timer = threading.Timer(0.2, lambda: path.write_text(path.read_text()))
        timer.start()
        with pytest.raises(ConfigurationError, match="another run is writing"):
            RunDirectory(tmp_path)
        timer.join()
    assert capsys.readouterr().out.count("waiting up to 60 s") == 1


ENDS = """
import errno, os, signal, sys, time
from pathlib import Path
from samecurve.storage import file_lock

def refuse(*_):
    raise OSError(errno.ENOSYS, "")

file_lock.fcntl.flock = refuse
from samecurve.errors import DataError, HangError
from samecurve.run import lifecycle
from samecurve.run.run_directory import RunDirectory

def main():
    run = RunDirectory(Path(sys.argv[1]), reads=[Path(sys.argv[1], "model")] if kind == "refused" else [])
    with lifecycle.supervised(run) as watch:
        assert Path(sys.argv[1], ".lock.owner").exists()
        run.begin()
        if kind == "failed":
            raise DataError("a row")
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        if kind == "hang":
            watch._end(HangError("no progress"))

kind = sys.argv[2]
sys.modules["torch"] = sys  # as after a training: os._exit
lifecycle.end_with(main)
"""


@pytest.mark.parametrize(
    ("kind", "code"), [("done", 0), ("failed", 3), ("refused", 2), ("stopped", 143), ("hang", HangError.exit_code)]
)
def test_without_flock_an_orderly_end_leaves_no_owner(kind, code, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "run.json").write_text("{}")
    words = [sys.executable, "-c", ENDS, str(tmp_path), kind]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert not (tmp_path / locking.OWNER).exists()
