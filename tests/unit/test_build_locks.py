"""A lock without a builder is removed, with a builder it is kept, and on a shared disk nobody is hurried."""

from __future__ import annotations

import os
import time

import pytest

from samecurve.strategy import op_build_locks


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def clear(lock) -> list[str]:
    said: list[str] = []
    op_build_locks.clear_build_locks(
        {"cpu_adam", "async_io"}, said.append, {"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}
    )
    return said


def test_without_a_builder_it_is_removed_and_told(lock):
    assert clear(lock) == [f"{lock}: removed; the process that compiled cpu_adam was killed and left it"]
    assert not lock.exists()
    assert clear(lock) == []


def test_of_a_builder_on_this_machine_it_is_kept(lock):
    from torch.utils.file_baton import FileBaton

    lock.unlink()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert clear(lock) == [] and lock.exists()
    baton.release()


def test_on_a_shared_disk_it_is_waited_for(lock, monkeypatch):
    """The other host goes on writing for two looks, then is done."""
    monkeypatch.setattr(op_build_locks, "_is_shared", lambda path: True)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            lock.unlink()

    monkeypatch.setattr(op_build_locks.time, "sleep", sleep)
    (said,) = clear(lock)
    assert "another host may be compiling cpu_adam" in said and str(lock) in said and len(looks) == 2


def test_on_a_shared_disk_a_quiet_folder_is_a_dead_builder(lock, monkeypatch):
    monkeypatch.setattr(op_build_locks, "_is_shared", lambda path: True)
    long_ago = time.time() - op_build_locks.UNSEEN_BUILDER_SECONDS - 1
    for path in (lock, lock.parent):
        os.utime(path, (long_ago, long_ago))
    assert len(clear(lock)) == 1 and not lock.exists()


def test_where_torch_builds(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    folder = cpp_extension._get_build_directory("cpu_adam", verbose=False)
    assert [str(path.parent) for path in op_build_locks.lock_files({"cpu_adam"}, os.environ)] == [folder]
