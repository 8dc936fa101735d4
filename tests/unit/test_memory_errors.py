"""Too little memory to read a file is not taken for a damaged file, and a bug in a save has its traceback."""

from __future__ import annotations

import contextlib

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from samecurve.checkpoint import commit
from samecurve.data import formats, hub, opening, stream_files, stream_pieces
from samecurve.errors import StorageError


@contextlib.contextmanager
def no_memory(*_, **__):
    raise pyarrow.lib.ArrowMemoryError("malloc of size 99 failed")
    yield


def test_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "open", no_memory, raising=False)
    with pytest.raises(MemoryError, match="malloc"):
        list(opening.lines_of(tmp_path / "a.jsonl"))


def test_a_stream(monkeypatch):
    monkeypatch.setattr(fsspec, "open", no_memory)
    with pytest.raises(MemoryError, match="malloc"):
        list(stream_pieces.opened_rows(stream_files.StreamFile("a.jsonl", "a.jsonl", 1, ""), list))


def test_parquet(tmp_path, monkeypatch):
    import datasets

    def load(*_, **__):
        raise pyarrow.lib.ArrowMemoryError("malloc of size 99 failed")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(MemoryError, match="malloc"):
        list(formats.parquet_rows(tmp_path / "a.parquet"))


def test_a_split_of_the_hub():
    class Table:
        def __iter__(self):
            raise pyarrow.lib.ArrowMemoryError("malloc of size 99 failed")

    with pytest.raises(MemoryError, match="malloc"):
        list(hub.Split("own/name", "default", "train", "c0ffee", Table()).rows())


@pytest.mark.parametrize(("error", "traced"), [(KeyError("a bug"), True), (OSError("no space"), False)])
def test_a_bug_in_a_save_has_its_traceback(error, traced, capsys):
    def work():
        raise error

    with pytest.raises(StorageError, match="rank 0: (KeyError: 'a bug'|OSError: no space)"):
        commit._together(lambda own, conclude: conclude([own]), commit._attempt(work), lambda results: None)
    assert ("Traceback" in capsys.readouterr().err) is traced
