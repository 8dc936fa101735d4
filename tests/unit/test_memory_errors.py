"""Too little memory to read a file is not taken for a damaged file, and a bug in a save has its traceback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from samecurve.checkpoint import commit
from samecurve.cli import commands
from samecurve.data import formats, hub, opening, stream_pieces
from samecurve.errors import DataError, StorageError

SAYS = r"a.jsonl: not enough memory to read it \(malloc of size 99 failed\); .* split it"


@contextlib.contextmanager
def no_memory(*_, **__):
    raise pyarrow.lib.ArrowMemoryError("malloc of size 99 failed")
    yield


def test_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "open", no_memory, raising=False)
    with pytest.raises(DataError, match=SAYS):
        list(opening.lines_of(tmp_path / "a.jsonl"))


def test_a_stream(monkeypatch):
    monkeypatch.setattr(fsspec, "open", no_memory)
    with pytest.raises(DataError, match=SAYS):
        list(stream_pieces.opened_rows(stream_pieces.StreamFile("a.jsonl", "a.jsonl", 1, ""), list))


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", no_memory)
    with pytest.raises(DataError, match="a.parquet: not enough memory"):
        list(formats.parquet_rows(tmp_path / "a.parquet"))


def test_the_last_resort_is_a_line(monkeypatch, capsys):
    def work(*_):
        raise MemoryError

    monkeypatch.setattr(commands, "_dispatch", work)
    assert commands.main([]) == 1
    assert re.fullmatch(r"out of host memory in .*test_memory_errors.py:\d+ \(work\)\n", capsys.readouterr().err)


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


def test_a_protocol_without_its_package_says_what_to_install():
    error = ImportError("HTTPFileSystem requires requests and aiohttp")  # as fsspec raises it
    error.__cause__ = ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")
    assert str(opening.unreadable("https://host/a.jsonl", error)).endswith("; pip install aiohttp")


BOMBS = """
import bz2, gzip, json, lzma, resource, sys, time
from pathlib import Path
import psutil, pyarrow, pyarrow.parquet
from samecurve.data import formats
from samecurve.errors import DataError
from samecurve.specs.data_names import table_kind

folder, MIB = Path(sys.argv[1]), 1 << 20
zstd = lambda data: pyarrow.compress(data, "zstd", asbytes=True)
packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
packers = {suffix: packers[suffix] for suffix in sys.argv[2:]}
ENDLESS = {"jsonl": b'{"text": "a', "csv": b'text\\n"a\\n', "json": b'[{"text": "a', "txt": b"a"}
for kind, head in ENDLESS.items():
    for suffix, pack in packers.items():
        if kind in ("jsonl", "csv") or suffix == "gz":
            lines = b"a" * MIB + (b"\\n" if kind == "csv" else b"")
            (folder / f"{kind}.{kind}.{suffix}").write_bytes(pack(head) + pack(lines) * 2048)
many = b"text\\n" + (b'"' + b"a" * MIB + b'\\n",') * 400  # one row of many fields
(folder / "fields.csv.gz").write_bytes(gzip.compress(many))
(folder / "lists.jsonl").write_bytes(b'{"text": [' + b"[]," * (20 * MIB) + b"[]]}\\n")
long = pyarrow.table({"text": ["a" * 300 * MIB]})
pyarrow.parquet.write_table(long, folder / "long.parquet", compression="zstd", use_dictionary=False)
with pyarrow.ipc.new_file(str(folder / "long.arrow"), long.schema) as writer:
    writer.write_table(long)
indices = pyarrow.array([0] * 700, pyarrow.int32())
coded = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * 3_200_000]))
pyarrow.parquet.write_table(pyarrow.table({"text": coded}), folder / "coded.parquet", store_schema=False)
del long, coded, lines
limit = psutil.Process().memory_info().vms + 1200 * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for file in sorted(folder.iterdir()):
    began = time.monotonic()
    try:
        num_rows = sum(1 for _ in formats.read_rows(file)) if table_kind(file) else len(formats.read_text(file))
        print(json.dumps([file.name, f"{num_rows} rows", time.monotonic() - began]))
    except DataError as error:
        print(json.dumps([file.name, str(error), time.monotonic() - began]))
"""
TOO_LONG = {"jsonl": ":1: the row is longer than 64 MiB", "csv": ":2: the row is longer than 64 MiB"}
TOO_LONG |= {"fields": TOO_LONG["csv"], "long": ": row 1: the row is longer than 64 MiB"}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux")
@pytest.mark.parametrize(
    "suffixes", [["gz"], pytest.param(["gz", "bz2", "xz", "zst"], marks=pytest.mark.full)], ids=len
)
def test_no_file_takes_more_memory_than_its_row(suffixes, tmp_path):
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-c", BOMBS, tmp_path, *suffixes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcomes = list(map(json.loads, done.stdout.splitlines()))
    assert len(outcomes) == 7 + 2 * len(suffixes)
    for name, text, seconds in outcomes:
        assert name == "coded.parquet" or text.startswith(str(tmp_path / name)), text
        assert seconds < 60
        if name == "coded.parquet":
            assert text == "700 rows"
        elif name == "lists.jsonl" or name.startswith(("txt", "json.")):
            assert "not enough memory" in text or "the file has more than 1024 MiB" in text, text
        else:
            assert TOO_LONG[name.partition(".")[0]] in text
