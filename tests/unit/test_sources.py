from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import shutil
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pyarrow.parquet
import pytest
from file_damage import DAMAGES
from report_cases import check_message
from report_cases import missing as absent
from tiny_recipes import recipe_file

from samecurve.config import loader
from samecurve.data import formats, sources, stream_pieces
from samecurve.data.selection import _saved_files
from samecurve.errors import ConfigurationError, DataError
from samecurve.run.run_directory import RunDirectory
from samecurve.specs.data_names import BUILTIN
from samecurve.tasks import registry


def jsonl(path: Path, *texts: str, column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def parquet(path: Path, **columns: list) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def texts(path: Path, **options) -> list[str]:
    return list(sources.find_source(str(path), **options).documents())


def test_a_text_file_is_one_document_whatever_its_name(tmp_path):
    (tmp_path / "notes").write_bytes("one\r\nüber\n".encode())
    assert texts(tmp_path / "notes") == ["one\r\nüber\n"]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ["c.txt", "b/z.md", "a.py", "picture.png", ".git/x.txt"]:
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.py", "b/z.md", "c.txt"]
    assert texts(tmp_path, pattern="**/*.md") == ["b/z.md"]
    assert texts(tmp_path, pattern="*.png") == ["picture.png"]


def test_all_of_a_csv_is_text(tmp_path):
    values = ["NA", "null", "None", "", "True", "007", "1.0", "one\ntwo", 'a "b", c', "ü", "x" * 200_000]
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerows([["id", "text"], [], *([number, value] for number, value in enumerate(values))])
    data = codecs.BOM_UTF8 + buffer.getvalue().encode()
    (tmp_path / "a.csv").write_bytes(data)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(data))
    assert texts(tmp_path / "a.csv") == texts(tmp_path / "b.csv.gz") == values
    assert texts(tmp_path / "a.csv", text_column="id") == list(map(str, range(len(values))))


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (b'text\n"a\nb"\n\nc,d\n', ("T/a.csv:5", "2 fields", "header has 1", "correct the row", "quote the field")),
        (b'text\na\n"b\nc\n', ("T/a.csv:3", "csv", "unexpected end of data", "correct or remove it")),
        (b"text\na\nf\xfcr\n", ("T/a.csv:3", "byte 8", "0xfc", "UTF-8", "convert the file")),
        (b"text,id,text\na,1,b\n", ("T/a.csv:1", "two columns", "'text'", "rename or remove one")),
        (b'id,txt\n1,"a\nb"\n2,b\n', ("T/a.csv:2", "no column 'text'", "found: id, txt", "set data.text_column")),
    ],
)
def test_errors_of_a_csv_name_the_line_where_the_row_begins(tmp_path, data, row):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError) as caught:
        texts(tmp_path / "a.csv")
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + b'{"text": "x"}\n{"text": y}\n')
    with pytest.raises(DataError, match=f"{name}:2: .* JSON at column 10"):
        texts(tmp_path / name)
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + b'{"text": "x\xfc"}\n')
    with pytest.raises(DataError, match=f"{name}:1: byte 14 "):
        texts(tmp_path / name)
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + b'{"text": "x"}\n')
    assert texts(tmp_path / name) == ["x"]


def test_a_byte_order_mark_before_an_array(tmp_path):
    (tmp_path / "a.json").write_bytes(codecs.BOM_UTF8 + b'\n[{"text": "x"}]')
    assert texts(tmp_path / "a.json") == ["x"]


def test_compressed_texts(tmp_path):
    (tmp_path / "a.md.gz").write_bytes(gzip.compress("über\n".encode()))
    (tmp_path / "b.TXT.GZ").write_bytes(gzip.compress(b"x"))
    assert texts(tmp_path) == ["über\n", "x"]
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(b"a\nf\xfcr"))
    with pytest.raises(DataError, match="a.md.gz:2: byte 3 .0xfc. is not UTF-8"):
        texts(tmp_path)
    (tmp_path / "a.md.gz").write_bytes(b"x")
    with pytest.raises(DataError, match="a.md.gz: could not be read: "):
        texts(tmp_path)


ROWS = {"txt": "größer\u2028無\r\n", "jsonl": '{"text": "größer"}\n{"text": "無"}\n', "csv": "text\ngrößer\n無\n"}
ROWS["json"] = '[{"text": "größer"},\n {"text": "無"}]'


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


ENCODINGS = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8"]


@pytest.mark.parametrize(
    ("kind", "encoding", "suffix"),
    [*product(ROWS, ENCODINGS, [""]), *product(ROWS, ["utf-16-le"], [".gz", ".zst"])],
)
def test_a_marked_encoding_is_read(tmp_path, kind, encoding, suffix):
    data = ("\ufeff" + ROWS[kind]).encode(encoding)
    file = tmp_path / f"a.{kind}{suffix}"
    file.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstd}[suffix](data))
    assert texts(file) == ([ROWS[kind]] if kind == "txt" else ["größer", "無"])
    if kind == "jsonl":
        assert list(formats.read_last_row(file)) == (
            [] if suffix or encoding != "utf-8" else [(f"{file}: the last line", {"text": "無"})]
        )


def test_zstd_in_frames_and_truncated(tmp_path):
    data = [b'{"text": "x"}\n', b'{"text": "y"}\n' * 1000]
    frames = b"".join(map(zstd, data))
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    assert texts(tmp_path) == ["x", *["y"] * 1000]
    (tmp_path / "a.jsonl.zst").write_bytes(frames[:-5])
    with pytest.raises(DataError, match="a.jsonl.zst: could not be read: .*runcated"):
        texts(tmp_path)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("cp1252", "is not UTF-8: .*; find out the file's encoding .`file NAME` guesses it.*iconv -f ENCODING -t"),
        ("gbk", "is not UTF-8: .*; find out the file's encoding"),
        ("utf-16-le", "bytes are 0, as in UTF-16 or UTF-32 without a byte-order mark, .*; find out"),
        ("utf-32-be", "bytes are 0, as in UTF-16 or UTF-32 without"),
    ],
)
def test_no_encoding_is_named_without_a_mark(tmp_path, kind, encoding, message):
    text = (
        ROWS[kind]
        .replace("größer", "grüße" if encoding == "cp1252" else "高兴")
        .replace("無", "!")
        .replace("\u2028", "")
    )
    (tmp_path / f"a.{kind}").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=f"a.{kind}.*{message}"):
        texts(tmp_path)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "csv.gz"])
def test_a_line_without_an_end_is_refused(tmp_path, suffix, monkeypatch):
    """Also one that is small only as long as it is packed: no more than the longest row is ever read."""
    monkeypatch.setattr(formats, "LONGEST_ROW", 1 << 20)
    data = b'{"text": "x"}\n{"text": "' if "jsonl" in suffix else b"text\n"
    data += b"a" * (1 << 25)
    pack = {"gz": gzip.compress, "zst": zstd}.get(suffix.rpartition(".")[2], bytes)
    (tmp_path / f"a.{suffix}").write_bytes(pack(data))
    tracemalloc.start()
    with pytest.raises(DataError, match=f"a.{suffix}:2: the row is longer than .* MiB; is a line break missing"):
        texts(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()


def test_a_last_line_without_an_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_ROW", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "' + b"a" * (1 << 25))
    tracemalloc.start()
    with pytest.raises(DataError, match="a.jsonl: the last line: the row is longer than"):
        list(formats.read_last_row(tmp_path / "a.jsonl"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_category_counts_only_its_own_text(tmp_path, monkeypatch):
    """pandas' categories: Arrow counts the whole dictionary in the size of each row."""
    monkeypatch.setattr(formats, "LONGEST_ROW", 1 << 16)
    values = pyarrow.array([f"{number:030000d}" for number in range(8)])
    for name, column in (("plain", values), ("categories", values.dictionary_encode())):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}.parquet")
    assert texts(tmp_path / "categories.parquet") == texts(tmp_path / "plain.parquet")


def test_a_truncated_utf16_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffab".encode("utf-16-le")[:-1])
    with pytest.raises(DataError, match="a.txt: not valid UTF-16, although .* mark: truncated data; is the file comp"):
        texts(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"


@pytest.mark.parametrize("kind", [*ROWS, "parquet", "jsonl.gz", "txt.zst"])
def test_a_git_lfs_pointer_says_what_to_do(tmp_path, kind):
    (tmp_path / f"a.{kind}").write_bytes(POINTER)
    with pytest.raises(DataError, match=rf"a.{kind}: the file is a Git LFS pointer, .*; run `git lfs pull` in its"):
        texts(tmp_path)
    (tmp_path / "a.txt").write_bytes(POINTER + b"x" * 1024)  # a text about pointers
    assert len(texts(tmp_path / "a.txt")) == 1


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ('{\n "text": "x"\n}', ("T/a.json", "one JSON object", "'text'", "list of objects")),
        ('{\n "text": "x"\n', ("T/a.json:1", "JSON at column 2", "Expecting property name")),
    ],
)
def test_json_that_is_no_rows(tmp_path, content, row):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as caught:
        texts(tmp_path / "a.json")
    check_message(str(caught.value).replace(str(tmp_path), "T"), *row)


def test_a_path_with_wildcards_is_told_where_they_belong():
    hint = "; a path cannot contain wildcards: set the path to the folder data/books, and data.pattern='**/*.txt'"
    assert sources.pattern_hint("data/books/**/*.txt") == hint
    assert sources.pattern_hint("*.txt", "data.mixture.1.pattern").endswith(
        "the folder ., and data.mixture.1.pattern='*.txt'"
    )
    assert sources.pattern_hint("data/books") == ""
    with pytest.raises(DataError, match="data.path does not exist; .*; a path cannot contain wildcards"):
        sources.find_source("data/*.txt")


def test_parquet_files_of_a_folder(tmp_path):
    parquet(tmp_path / "2.parquet", text=["c"], id=[3])
    parquet(tmp_path / "1.parquet", text=["a", "b"], id=[1, 2])
    assert texts(tmp_path) == ["a", "b", "c"]


def test_columns_that_are_not_read_may_differ_between_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "id": 1}\n{"text": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "z", "id": "one", "more": [1]}\n')
    assert texts(tmp_path) == ["x", "y", "z"]


def test_python_itself():
    source = sources.find_source(BUILTIN)
    names = {file.name for file in source.files}
    assert {"argparse.py", "dataclasses.py", "decoder.py"} <= names
    assert not any(
        {"test", "tests", "idlelib", "site-packages", "encodings"} & set(file.parts) for file in source.files
    )
    assert 300 < len(source.files) < 1200


NOT_UTF_8 = ("0xfc", "UTF-8", "invalid start byte", "`file NAME` guesses", "iconv -f ENCODING -t UTF-8", "data.pattern")
# What is in the folder T, by the name of the file: text in Latin 1, or the columns of a parquet file; and the message.
ERRORS = {
    "empty folder": ({}, ("T", "folder is empty", "data.path")),
    "no usable file": ({"a.png": ""}, ("T", "1 files", "text", "table", ".png", "set data.pattern")),
    "mixed": (
        {"README.md": "about the data", "a.jsonl": '{"text": "x"}\n'},
        ("T", "1 table files (a.jsonl, ...)", "1 text files (README.md, ...)", "data.pattern='**/*.jsonl'"),
    ),
    "latin 1 text": ({"a.txt": "one\ntwo\nf\xfcr\n"}, ("T/a.txt:3", "byte 9", *NOT_UTF_8)),
    "latin 1 jsonl": ({"a.jsonl": '{"text": "x"}\n{"text": "f\xfcr"}\n'}, ("T/a.jsonl:2", "byte 25", *NOT_UTF_8)),
    "broken jsonl": (
        {"a.jsonl": '{"text": "x"}\n\n{"text": y}\n'},
        ("T/a.jsonl:3", "JSON at column 10", "Expecting value", "correct or remove the line"),
    ),
    "missing column": (
        {"a.parquet": {"texts": ["a"], "id": [1]}},
        ("T/a.parquet: row 1", "no column 'text'", "found: texts, id", "set data.text_column"),
    ),
    "missing in a row": (
        {"a.jsonl": '{"text": "x"}\n{"id": 1}\n'},
        ("T/a.jsonl:2", "no column 'text'", "found: id", "set data.text_column", "remove rows without text"),
    ),
    "null": (
        {"a.jsonl": '{"text": null}\n'},
        ("T/a.jsonl:1", "'text'", "None", "not text", "correct or remove the row"),
    ),
    "list": ({"a.jsonl": '["x"]\n'}, ("T/a.jsonl:1", "['x']", "JSON object", '{"column": ...}')),
    "half a character": (
        {"a.jsonl": '{"text": "\\ud83d\\ude00"}\n{"text": "ab \\ud83d"}\n'},
        ("T/a.jsonl:2", "'text'", "lone surrogate", "'\\ud83d'", "character 3", "correct or remove the row"),
    ),
    "broken gzip": ({"a.jsonl.gz": "not gzip"}, ("T/a.jsonl.gz", "could not be read")),
    "broken parquet": ({"a.parquet": "not parquet"}, ("T/a.parquet", "row 0", "complete")),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_place_and_the_fix(tmp_path, case):
    files, row = ERRORS[case]
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / name).write_bytes(content.encode("latin-1"))
        else:
            parquet(tmp_path / name, **content)
    refuse(tmp_path, str(tmp_path), None, row)


@pytest.mark.parametrize(
    ("name", "pattern", "row"),
    [
        ("nothing", None, ("T/nothing", "data.path", "does not exist", "a file, a folder, or builtin:python-stdlib")),
        ("", "**.jsonl", ("T", "data.pattern='**.jsonl' is no pattern within the folder", "**/*.jsonl")),
        ("", "*.rst", ("T", "no file", "data.pattern='*.rst'", "**/*.ext")),
    ],
)
def test_paths_and_patterns_that_name_nothing(tmp_path, name, pattern, row):
    (tmp_path / "a.txt").write_text("")
    refuse(tmp_path, str(tmp_path / name), pattern, row)


def refuse(folder: Path, name: str, pattern: str | None, row: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        list(sources.find_source(name, pattern).documents())
    check_message(str(caught.value).replace(str(folder), "T"), *row)


def test_fingerprint_is_of_the_content(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    first = sources.fingerprint(sources.find_source(str(tmp_path)), tmp_path / "cache")
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert sources.fingerprint(sources.find_source(str(tmp_path / "b.txt")), tmp_path / "cache") == first
    before = (tmp_path / "b.txt").stat()
    (tmp_path / "b.txt").write_text("two")
    os.utime(tmp_path / "b.txt", ns=(before.st_atime_ns, before.st_mtime_ns))  # within one tick of a coarse clock
    assert sources.fingerprint(sources.find_source(str(tmp_path / "b.txt")), tmp_path / "cache") != first


@pytest.mark.parametrize("change", ["nothing", "replaced", "rewritten", *DAMAGES])
def test_an_old_file_is_read_once_for_its_fingerprint(tmp_path, monkeypatch, change):
    """Replaced or rewritten with the same size and time, as rsync -t, tar and SOURCE_DATE_EPOCH do."""
    monkeypatch.setattr(sources, "_RACY_SECONDS", 0.0)
    file, new = tmp_path / "a.txt", tmp_path / "new"
    file.write_text("one")
    os.utime(file, (1, 1))
    time.sleep(0.02)  # several ticks of the file system's clock
    source, read = sources.find_source(str(file)), []
    first = sources.fingerprint(source, tmp_path / "cache")
    hashed = sources.file_sha256
    monkeypatch.setattr(sources, "file_sha256", lambda file: read.append(file) or hashed(file))
    if change == "replaced":
        new.write_text("two")
        os.utime(new, (1, 1))
        new.replace(file)
    elif change == "rewritten":
        file.write_text("two")
        os.utime(file, (1, 1))
    elif change in DAMAGES:
        (remembered,) = (tmp_path / "cache" / "fingerprints").iterdir()
        assert DAMAGES[change](remembered)
    again = sources.fingerprint(source, tmp_path / "cache")
    assert (again == first) is (change not in ("replaced", "rewritten"))
    assert bool(read) is (change != "nothing")


def test_held_out_is_a_stable_property_of_the_text():
    documents = [f"document {i}" for i in range(4000)]
    small, large = ({d for d in documents if sources.is_held_out(d, fraction)} for fraction in (0.1, 0.3))
    assert small < large
    assert len(small) == pytest.approx(400, abs=95)  # 19 is one sigma.
    assert not any(sources.is_held_out(d, 0.0) for d in documents)


def test_a_first_look_finds_what_is_wrong_with_all_rows(tmp_path):
    jsonl(tmp_path / "a.jsonl", *["x"] * 50, "y")
    (tmp_path / "b.csv").write_text("text,id\nx,1\ny\n")
    (tmp_path / "c.jsonl").write_text('{"text": 1}\n{"body": "x"}\n{"text": "x')
    with pytest.raises(DataError) as caught:
        sources.find_source(str(tmp_path), "*.jsonl").check()
    header, *rows = str(caught.value).replace(str(tmp_path), "T").splitlines()
    assert (header.partition(";")[0], len(rows)) == ("T: 3 of 54 rows cannot be used", 3)
    check_message(rows[0], "  T/c.jsonl:1", "'text'", "1", "not text")
    check_message(rows[1], "  T/c.jsonl:2", "'text'", "found: body", "set data.text_column")
    check_message(rows[2], "  T/c.jsonl:3", "JSON at column 10", "Unterminated string", "truncated")
    with pytest.raises(DataError, match="b.csv:3: .* 1 fields, .* 2;"):
        sources.find_source(str(tmp_path / "b.csv")).check()
    sources.find_source(str(tmp_path / "a.jsonl")).check()


def test_a_first_look_at_large_files_finds_a_last_line_that_broke_off(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHECK_SECONDS", 0.0)
    lines = [json.dumps({"text": "x" * size}) for size in (1, 200_000, 3, 200_000)]
    path = tmp_path / "a.jsonl"
    for end in ("", "\n", "\n\n"):
        path.write_text("\n".join(lines) + end)
        monkeypatch.setattr(sources, "rows_or_errors", lambda file: iter([("the first", {"text": "x"})]))
        sources.find_source(str(path)).check()
        assert [row for _, row in formats.read_last_row(path)] == [json.loads(lines[-1])]
    path.write_text("\n".join(lines)[:-2])
    with pytest.raises(DataError, match="a.jsonl: the last line: .* JSON at column 10: Unterminated string"):
        sources.find_source(str(path)).check()
    path.write_bytes("\n".join(lines).encode()[:-3] + b"\xff")
    position = len("\n".join(lines)) - 3
    with pytest.raises(DataError, match=f"a.jsonl: the last line: byte {position} .0xff. is not UTF-8"):
        sources.find_source(str(path)).check()
    assert not list(formats.read_last_row(jsonl(tmp_path / "empty.jsonl")))


@contextmanager
def by_another_user():
    """A folder that is open to all, and permission bits that bind also where the tests run as root."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(me)
        shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a.json"])
def test_a_file_without_read_permission_is_an_error_that_names_it(name, monkeypatch):
    me = os.geteuid()
    with by_another_user() as folder:
        os.seteuid(me)
        (folder / name).write_bytes(b"x")
        (folder / name).chmod(0 if me else 0o600)
        os.seteuid(65534 if me == 0 else me)
        source = sources.find_source(str(folder))
        readers = [lambda: sources.fingerprint(source, folder / "cache"), lambda: list(source.documents())]
        readers += (
            []
            if name.endswith((".csv", ".json"))
            else [lambda: stream_pieces.find_stream_files(str(folder), None, "text")]
        )
        for read in readers:
            with pytest.raises(DataError) as caught:
                read()
            expected = f"{folder / name}: ", "Permission denied", "chmod +r", "data.pattern"
            assert not absent(str(caught.value), expected)
        os.seteuid(me)
        (folder / name).unlink()
        (folder / "b.txt").write_text("x")
        (folder / "closed").mkdir(mode=0 if me else 0o700)
        os.seteuid(65534 if me == 0 else me)
        with pytest.raises(DataError, match="closed: the folder cannot be listed: Permission denied; give the user"):
            sources.find_source(str(folder))
        with pytest.raises(DataError, match="no permission to read .*a.txt; give"):
            sources.find_source(str(folder / "closed" / "a.txt"))
        os.seteuid(me)
        (folder / "closed").chmod(0o700)  # or its owner could not remove it


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    message = "loop.jsonl: is a symbolic link that leads back to itself; let it point to the data"
    with pytest.raises(DataError, match=message):
        sources.find_source(str(tmp_path / "loop.jsonl"))
    with pytest.raises(ConfigurationError, match=f"data.path: .*{message.replace(':', '')}"):
        loader.load_recipe("recipes/pretrain.yaml", [f"data.path={tmp_path / 'loop.jsonl'}"])
    jsonl(tmp_path / "a.jsonl", "x")
    (tmp_path / ".#a.jsonl").symlink_to("someone@host:1")  # Emacs
    for pattern in (None, "*.jsonl"):
        with pytest.raises(DataError, match="loop.jsonl: a symbolic link to loop.jsonl, which does not exist; restore"):
            texts(tmp_path, pattern=pattern)
    (tmp_path / "loop.jsonl").unlink()
    assert texts(tmp_path) == ["x"]


def test_a_fifo_is_not_missing(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl: is a FIFO \(named pipe\), which can be read only once; copy"):
        sources.find_source(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,id\n", "each line of a csv file below its header must be a row with its text under 'text'"),
        ("a.jsonl", "\n", "each line of a jsonl file must be an object with its text under 'text'"),
        ("a.json", "[]", "a json file must be a list, in which each entry is an object with its text under 'text'"),
    ],
)
def test_a_table_without_a_row_is_called_what_it_is(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        sources.find_source(str(tmp_path / name)).check()
    assert str(caught.value) == f"{tmp_path / name}: there are no rows; {message}"


def made_recipe(folder: Path, *overrides: str, **keys):
    more = {"tokenizer": {"vocabulary_size": 300}, "batch": {"global_batch_size": 4, "sequence_length": 8}}
    keys, run = {"cache_dir": str(folder / "cache"), **keys}, str(folder / "runs" / "now")
    return loader.load_recipe(
        recipe_file(folder.parent, folder, "pretrain", data=keys, output_dir=run, **more), overrides
    )


def trained_texts(task) -> set[str]:
    stream = task.train.stream
    spans = zip(stream.offsets[:-1], stream.offsets[1:], strict=True)
    return {task.tokenizer.decode(stream.tokens[a:b].tolist(), skip_special_tokens=True) for a, b in spans}


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_what_runs_write_below_the_data_is_no_data(tmp_path, kind, capsys):
    """Real run directories: one that is under way and one that is done. Read again, as by a session that goes on."""
    folder = tmp_path / "mine"
    expected = {f"text {n} of mine" for n in range(9)}
    (folder / "books").mkdir(parents=True)
    for n, text in enumerate(sorted(expected)):
        (folder / "books" / f"{n}.{kind}").write_text(json.dumps({"text": text}) if kind == "jsonl" else text)
    for name in ("before", "now"):
        run = RunDirectory(folder / "runs" / name)
        run.status("running")
        run.begin()
        run.append_metrics({"step": 1, "loss": 1.0, "text": "a line of metrics"})
        (run.path / "heartbeats").mkdir()
        (run.path / "heartbeats" / "rank_00000.json").write_text('{"text": "beat"}')
        (run.path / "report.html").write_text("a report")
        (run.path / "stacks").mkdir()
        (run.path / "stacks" / "rank_00000.txt").write_text("a stack")
        run.close()
    (folder / "runs" / "now" / "status.json").unlink()  # another machine has its heartbeats there, and no more
    found = made_recipe(folder)
    first, again = (registry.load_task(found) for _ in range(2))
    assert trained_texts(first) == expected == trained_texts(again)
    assert first.train.fingerprint == again.train.fingerprint
    told = capsys.readouterr().out
    where = f"(in {folder / 'runs' / 'before'}, {folder / 'runs' / 'now'})"
    line = f"{folder}: 9 files that runs of samecurve wrote are left out of the data {where}\n"
    assert told.count(line) == 1
    if kind == "txt":
        streamed = stream_pieces.find_stream_files(str(folder), None, "text", sources.Selection.of(found, found.data))
        assert {Path(file.name).parent.name for file in streamed} == {"books"}


def test_a_folder_of_ones_own_with_a_status_is_data(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "Ohio", "step": 1}')
    jsonl(tmp_path / "a.jsonl", "x")
    with pytest.raises(DataError, match="no column 'text', found: state, step"):
        texts(tmp_path)


def test_tables_of_several_splits_are_not_all_trained_on(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        jsonl(tmp_path / "data" / f"{name}.jsonl", name)
    with pytest.raises(DataError, match=r"more than one split .*\(data/train-00000-of-00002.jsonl, data/test-00000-of"):
        texts(tmp_path)
    assert len(texts(tmp_path, pattern="**/*train*")) == 2
    (tmp_path / "data" / "test-00000-of-00001.jsonl").rename(tmp_path / "data" / "latest.jsonl")
    assert len(texts(tmp_path)) == 3


NO_ROWS = [
    (
        ["", ""],
        {},
        "0 training rows of batch.sequence_length=8 are fewer than batch.global_batch_size=4 (2 of 2 documents are "
        "empty); give more data, or lower batch.global_batch_size",
    ),
    (
        [*"abc", ""],
        {"validation_fraction": 0.9999},
        "(3 of 4 documents held out by data.validation_fraction=0.9999; 1 of 4 documents are empty); lower that "
        "fraction, or give more data, or lower batch.global_batch_size",
    ),
]


@pytest.mark.parametrize(("rows", "keys", "message"), NO_ROWS)
def test_no_training_rows_say_why(tmp_path, rows, keys, message):
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "a.jsonl", *rows)
    jsonl(tmp_path / "tokens.jsonl", "other text")
    keys = {"cache_dir": str(tmp_path / "cache"), **keys}
    overrides = [f"data.path={tmp_path / 'tokens.jsonl'}", "batch.global_batch_size=1"]
    words = registry.load_task(made_recipe(folder, *overrides, cache_dir=keys["cache_dir"]))
    words.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(DataError) as caught:
        registry.load_task(
            made_recipe(folder, f"tokenizer={{path: {tmp_path / 'tokenizer'}, vocabulary_size: null}}", **keys)
        )
    assert message in str(caught.value)


NUMBERED = [{"text": "a", "id": 1}, {"text": 'b "c"', "id": 2}, {"text": "d\te", "id": 3}]


def documents_of(path: Path, **selection) -> list[str]:
    source = sources.find_source(str(path), selection=sources.Selection(**selection))
    source.check()
    return list(source.documents())


def test_tsv_is_csv_with_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tid\na, b\t1\n"c\td"\t2\n')
    assert documents_of(tmp_path / "a.tsv") == ["a, b", "c\td"]
    (tmp_path / "b.tsv").write_text("text\tid\na\n")
    with pytest.raises(DataError, match="the row has 1 fields, but the header has 2"):
        documents_of(tmp_path / "b.tsv")


STRANGE = [{"splits": 3}, {"splits": {"a": 1}}, {"splits": ["a\0b"]}, {"_data_files": 3}, {"_data_files": [3]}]
STRANGE += [{"_data_files": [{"filename": "a\0b"}]}, {"_data_files": [{}]}, {"_data_files": "ab"}]


@pytest.mark.parametrize("content", STRANGE)
def test_strange_records_beside_data_are_not_those_of_save_to_disk(content, tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for name in ("dataset_dict.json", "state.json"):
        (tmp_path / name).write_text(json.dumps(content))
    assert _saved_files(tmp_path, "data") == ()


def test_folders_of_save_to_disk_are_read(tmp_path):
    """Written by datasets, and read in its order, with Arrow's nulls removed."""
    import datasets

    rows = [{**row, "more": {f"k{row['id']}": 1}} for row in NUMBERED]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "one", num_shards=2)
    assert documents_of(tmp_path / "one") == [row["text"] for row in NUMBERED]
    (file,) = sources.find_source(str(tmp_path / "one" / "data-00000-of-00002.arrow")).files
    assert [row["more"] for _, row in formats.read_rows(file)] == [{"k1": 1}, {"k2": 1}]
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="the splits train, test, .*set data.path to one of them, such as .*both/train"):
        documents_of(tmp_path / "both")
    assert len(documents_of(tmp_path / "both" / "train")) == 3
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="state.json names the file data-00001-of-00002.arrow, which is not there"):
        documents_of(tmp_path / "one")
    (tmp_path / "a.arrow").write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match="a.arrow: error after row 0: .*complete"):
        documents_of(tmp_path / "a.arrow")


def test_the_list_in_one_object_is_the_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": NUMBERED}, indent=1))
    assert documents_of(tmp_path / "a.json") == [row["text"] for row in NUMBERED]
    (tmp_path / "a.json").write_text(json.dumps({"train": NUMBERED, "test": NUMBERED}, indent=1))
    with pytest.raises(DataError, match="keys 'train', 'test'.*keep one of the lists, such as 'train'"):
        documents_of(tmp_path / "a.json")


def test_the_list_in_one_object_on_one_line_is_the_rows(tmp_path):
    path = tmp_path / "a.json"
    for end in ("", "\n", "\n\n"):
        path.write_text(json.dumps({"version": 1, "data": NUMBERED}) + end)
        assert documents_of(path) == [row["text"] for row in NUMBERED]
    rows = (
        {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"segments": [{"label": True, "text": "a"}]},
        {"text": "a", "entities": [{"start": 0}]},
        {"train": NUMBERED, "test": NUMBERED},
    )
    for row in rows:
        path.write_text(json.dumps(row))
        assert list(formats.read_rows(path)) == [(f"{path}:1", row)]
    path.write_text(json.dumps({"data": NUMBERED}) + "\n" + json.dumps({"data": NUMBERED}))
    assert [place for place, _ in formats.read_rows(path)] == [f"{path}:1", f"{path}:2"]


def test_the_first_rows_alone_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in NUMBERED) + "broken")
    assert documents_of(path, max_samples=2) == ["a", 'b "c"']
    prints = []
    for number in (None, 2, 3):
        source = sources.find_source(str(path), selection=sources.Selection(max_samples=number))
        prints.append(sources.fingerprint(source, tmp_path / "cache"))
    assert len(set(prints)) == 3
