from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash

from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage import cache, file_lock
from samecurve.storage.cache import (
    BLOCK_BYTES,
    FinishedEntry,
    NewEntry,
    build_once,
    cache_folder,
    digest,
    is_main_process,
)
from samecurve.storage.filesystem import LocalFileSystem


def write(entry: NewEntry) -> None:
    entry.write("a", b"made")


def read(entry: FinishedEntry) -> bytes:
    return entry.read("a")


def fail(entry: NewEntry) -> None:
    write(entry)
    raise ValueError("broken data")


def test_builds_once(tmp_path):
    target = tmp_path / "x" / "key"
    assert build_once(target, write, read) == b"made"
    assert build_once(target, fail, read) == b"made"
    assert list(target.parent.iterdir()) == [target]
    assert sorted(os.listdir(target)) == ["a", "files.json"]


def test_a_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="broken data"):
        build_once(tmp_path / "key", fail, read)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("theirs", ["whole", "damaged"])
def test_another_machine_may_be_first(tmp_path, theirs):
    def build(entry):
        build_once(tmp_path / "key", lambda other: other.write("a", b"theirs"), read)
        if theirs == "damaged":
            (tmp_path / "key" / "a").write_bytes(b"their")
        write(entry)

    assert build_once(tmp_path / "key", build, read) == (b"theirs" if theirs == "whole" else b"made")
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("damaged", [False, True])
def test_other_local_ranks_wait_for_a_whole_entry(tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(cache, "_DAMAGED_POLL_SECONDS", 0.1)
    target, results = tmp_path / "key", []
    if damaged:
        build_once(target, write, read)
        (target / "a").write_bytes(b"mada")
    monkeypatch.setenv("LOCAL_RANK", "1")
    waiting = threading.Thread(target=lambda: results.append(build_once(target, fail, read)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and not results
    monkeypatch.setenv("LOCAL_RANK", "0")
    build_once(target, write, read)
    waiting.join(10)
    assert results == [b"made"]


@pytest.mark.parametrize("parent", [".", "missing/parent"])
def test_leftovers_of_killed_builds_are_swept(tmp_path, parent):
    def killed_and_alive(entry):
        program = f"""
import os, signal
from pathlib import Path
from samecurve.storage.cache import build_once
build_once(Path({str(folder / "other")!r}), lambda entry: os.kill(os.getpid(), signal.SIGKILL), None)
"""
        subprocess.run([sys.executable, "-c", program], check=False)
        assert len(list(folder.glob(".building-*"))) == 2
        build_once(folder / "third", write, read)
        assert len(list(folder.glob(".building-*"))) == 1  # this build's own
        write(entry)

    folder = tmp_path / parent
    assert build_once(folder / "key", killed_and_alive, read) == b"made"
    assert sorted(os.listdir(folder)) == ["key", "third"]


def test_without_flock_only_what_nobody_locks_is_swept(tmp_path, monkeypatch):
    for name in (".building-of-another", ".building-left"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(file_lock.fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "no flock")))
    with file_lock.lock_folder(tmp_path / ".building-of-another"):
        build_once(tmp_path / "key", write, read)
    assert sorted(os.listdir(tmp_path)) == [".building-of-another", "key"]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        build_once(tmp_path / "file" / "key", write, read)
    assert str(tmp_path / "file") in str(caught.value)
    assert "SAMECURVE_CACHE" in str(caught.value)


def test_a_disk_that_damages_what_it_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalFileSystem, "sync", lambda self, file: os.ftruncate(file.fileno(), 3))
    with pytest.raises(StorageError, match=f"{tmp_path / 'key'}: .* right after it was written; delete this folder"):
        build_once(tmp_path / "key", write, read)


def test_what_is_written_in_pieces_is_hashed_by_blocks(tmp_path):
    content = np.random.default_rng(0).bytes(2 * BLOCK_BYTES + 5)
    entry = NewEntry(tmp_path)
    with entry.create("a") as file:
        for start in range(0, len(content), 700_001):
            file.write(content[start : start + 700_001])
    entry.write("empty", b"")
    entry.finish()
    assert (tmp_path / "a").read_bytes() == FinishedEntry(tmp_path).read("a") == content
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    assert FinishedEntry(tmp_path).hashes("a").blocks == [xxhash.xxh3_128_hexdigest(block) for block in blocks]
    assert FinishedEntry(tmp_path).hashes("empty") == (0, [])


def test_location(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("SAMECURVE_CACHE", raising=False)
    assert cache_folder(None) == Path("/home/somebody/.cache/samecurve")
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path))
    assert cache_folder(None) == tmp_path
    assert cache_folder("~/elsewhere") == Path("/home/somebody/elsewhere")


def test_digest_depends_on_every_part():
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a1"), digest(["a", 1])}) == 4


@pytest.mark.parametrize(("rank", "expected"), [(None, True), ("0", True), ("3", False)])
def test_only_rank_zero_prints(monkeypatch, rank, expected):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert is_main_process() is expected


def test_a_user_without_a_home(monkeypatch):
    def unknown(*_):
        raise KeyError

    for name in ("HOME", "SAMECURVE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigurationError, match="no home folder; set data.cache_dir"):
        cache_folder(None)
