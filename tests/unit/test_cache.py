from __future__ import annotations

import threading
from pathlib import Path

import pytest

from samecurve.errors import StorageError
from samecurve.storage.cache import build_once, cache_folder, digest, is_main_process


def write(directory: Path) -> None:
    (directory / "a").write_text("made")


def test_builds_once(tmp_path):
    target = tmp_path / "x" / "key"
    assert build_once(target, write) == target
    build_once(target, lambda _: pytest.fail("built again"))
    assert (target / "a").read_text() == "made"
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(directory):
        write(directory)
        raise ValueError("broken data")

    with pytest.raises(ValueError, match="broken data"):
        build_once(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []


def test_another_machine_may_be_first(tmp_path):
    def build(directory):
        (tmp_path / "key").mkdir()
        write(tmp_path / "key")
        (directory / "a").write_text("too late")

    assert (build_once(tmp_path / "key", build) / "a").read_text() == "made"
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_other_local_ranks_wait_for_the_finished_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = []
    target = tmp_path / "key"
    waiting = threading.Thread(target=lambda: found.append(build_once(target, lambda _: pytest.fail("rank 1 built"))))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and not found
    target.mkdir()
    waiting.join(10)
    assert found == [target]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        build_once(tmp_path / "file" / "key", write)
    assert str(tmp_path / "file") in str(caught.value)
    assert "SAMECURVE_CACHE" in str(caught.value)


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
