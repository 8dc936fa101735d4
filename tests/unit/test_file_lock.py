"""One live run per directory: what waits for the lock, and for how long."""

from __future__ import annotations

import threading
import time

import pytest

from samecurve.errors import ConfigurationError
from samecurve.run.run_directory import RunDirectory
from samecurve.storage import file_lock as locking
from samecurve.storage.file_lock import DEAD_HOST_SECONDS, lock_folder

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
