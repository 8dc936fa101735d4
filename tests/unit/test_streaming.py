from __future__ import annotations

import codecs
import gc
import gzip
import itertools
import json
import random
import shutil
import weakref
from collections import Counter

import fsspec
import numpy as np
import pyarrow.parquet
import pytest
import tiny_recipes
from file_damage import DAMAGES
from test_sources import POINTER, zstd
from tiny_recipes import make_recipe

from samecurve.checkpoint import resume
from samecurve.config import loader
from samecurve.data import sources, stream_pieces, token_store
from samecurve.data.batches import StepBatches
from samecurve.data.datasets.base import PackedRows
from samecurve.data.datasets.mixture import WeightedInterleaver
from samecurve.data.datasets.streaming import StreamRows
from samecurve.data.sampler import Steps
from samecurve.errors import ConfigurationError, DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.storage import records
from samecurve.tasks import registry

BUFFER = 4096


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Documents of very different length, one of them longer than a piece, between empty lines; all kinds of files; and
    a tokenizer that was trained on them, as streaming wants it."""
    draw, folder = random.Random(3), tmp_path_factory.mktemp("made")

    def texts(name: str, count: int) -> list[str]:
        return [f"{name} {i} " + "é" * draw.randint(0, 300) for i in range(count)]

    (folder / "data").mkdir()
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in [*texts("a", 80), "a long " + "x" * 3000]]
    (folder / "data" / "a.jsonl").write_text("\n\n".join(lines))  # no line break at the end
    with gzip.open(folder / "data" / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts("b", 30))
    table = pyarrow.table({"text": texts("c", 50), "other": list(range(50))})
    pyarrow.parquet.write_table(table, folder / "data" / "c.parquet", row_group_size=7)
    (folder / "texts").mkdir()
    for index, text in enumerate(texts("d", 25)):
        (folder / "texts" / f"{index:02}.txt").write_text(text)
    task = make_recipe(folder, folder / "data", "pretrain", tokenizer={"vocabulary_size": 300})
    registry.load_task(task).tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    for name in ("data", "texts"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def documents(path, buffer_bytes: float) -> list[list[str]]:
    """Of each piece."""
    pieces = stream_pieces.cut_into_chunks(stream_pieces.find_stream_files(str(path), None, "text"), buffer_bytes)
    return [list(stream_pieces.ChunkSource("x", (), "text", (piece,)).documents()) for piece in pieces]


@pytest.mark.parametrize("name", ["data", "texts", "data/a.jsonl", "data/b.jsonl.gz", "data/c.parquet"])
@pytest.mark.parametrize("buffer_bytes", [25, 333, 10**6])
def test_every_document_is_in_one_piece_whatever_its_size(folder, name, buffer_bytes):
    expected = list(sources.find_source(str(folder / name)).documents())
    found = documents(folder / name, buffer_bytes * 16)
    assert [text for piece in found for text in piece] == expected
    assert len(expected) >= 25


def test_pieces_are_cut_where_the_format_lets_them(folder):
    kinds = Counter(
        piece.kind
        for piece in stream_pieces.cut_into_chunks(
            stream_pieces.find_stream_files(str(folder / "data"), None, "text"), BUFFER
        )
    )
    size = (folder / "data" / "a.jsonl").stat().st_size
    assert kinds == {"lines": -(-size // (BUFFER // 16)), "compressed": 1, "parquet": 8}


def test_every_epoch_has_every_piece_once_in_an_order_of_its_own(folder):
    pieces = stream_pieces.cut_into_chunks(stream_pieces.find_stream_files(str(folder / "data"), None, "text"), BUFFER)
    blocks = stream_pieces.ShuffleBlocks(pieces, BUFFER, seed=1)
    assert 1 < blocks.per_epoch < len(pieces)
    orders = []
    for epoch in range(3):
        read = [blocks[epoch * blocks.per_epoch + nth] for nth in range(blocks.per_epoch)]
        orders.append([piece for block in read for piece in block])
        assert sorted(orders[-1], key=pieces.index) == pieces
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 5, 8))])
def test_neighbouring_blocks_of_two_epochs_share_no_piece(size):
    for num_pieces in range(1, 6 * size + 2):
        pieces = [stream_pieces.FileChunk("lines", (), nth, nth + 1, 1) for nth in range(num_pieces)]
        blocks = stream_pieces.ShuffleBlocks(pieces, size, seed=3)
        sizes = {len(blocks[nth]) for nth in range(blocks.per_epoch)}
        assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
        orders = set()
        for epoch in range(12):
            read = [piece.start for nth in range(blocks.per_epoch) for piece in blocks[epoch * blocks.per_epoch + nth]]
            assert sorted(read) == list(range(num_pieces))
            orders.add(tuple(read))
            if epoch and blocks.per_epoch > 1:
                assert not set(blocks[epoch * blocks.per_epoch - 1]) & set(blocks[epoch * blocks.per_epoch])
        assert len(orders) == 1 or blocks.per_epoch > 1
        assert len(orders) > 6 or num_pieces <= 5 * size


def test_a_stream_of_one_block_reads_no_row_twice_in_a_step(recipe_file):
    """All data fit into the buffer, so that the end of an epoch has the same rows as the beginning of the next one."""
    found = loader.load_recipe(recipe_file, ["data.shuffle_buffer_mib=1", "steps=20", "batch.global_batch_size=7"])
    task = registry.load_task(found)
    assert task.train.blocks_per_epoch == 1
    num_rows = len(task.train.make_block(0))
    assert 7 < num_rows < 40 and num_rows % 7
    steps = [[tuple(row) for row in step] for step in read(batches(task, found))]
    assert all(len(set(step)) == 7 for step in steps)
    rows = sum(steps, [])
    orders = [rows[epoch * num_rows : (epoch + 1) * num_rows] for epoch in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]) and orders[0] != orders[1] != orders[2]
    first = batches(registry.load_task(found), found)
    for _ in itertools.islice(first, num_rows // 7 + 1):  # up to the step in which the first epoch ends
        pass
    going_on = {"start_step": first.step, "start_samples": first.samples, "anchor": first.anchor}
    assert read(batches(registry.load_task(found), found, **going_on)) == [
        list(map(list, step)) for step in steps[first.step :]
    ]


def test_a_url_holds_the_same_as_the_folder(folder):
    remote = fsspec.filesystem("memory")
    remote.put(str(folder / "data"), "/samecurve_test", recursive=True)
    pieces = stream_pieces.cut_into_chunks(
        stream_pieces.find_stream_files("memory://samecurve_test", None, "text"), BUFFER
    )
    here = stream_pieces.cut_into_chunks(stream_pieces.find_stream_files(str(folder / "data"), None, "text"), BUFFER)
    assert [text for text in stream_pieces.ChunkSource("x", (), "text", tuple(pieces)).documents()] == [
        text for text in stream_pieces.ChunkSource("x", (), "text", tuple(here)).documents()
    ]
    assert stream_pieces.fingerprint(
        stream_pieces.find_stream_files("memory://samecurve_test", None, "text")
    ) == stream_pieces.fingerprint(stream_pieces.find_stream_files(str(folder / "data"), None, "text"))
    assert {piece.files[0].relative for piece in pieces} == {"a.jsonl", "b.jsonl.gz", "c.parquet"}
    chosen = stream_pieces.find_stream_files("memory://samecurve_test", "*.parquet", "text")
    assert [file.relative for file in chosen] == ["c.parquet"]
    with pytest.raises(DataError, match="memory://nowhere: "):
        stream_pieces.find_stream_files("memory://nowhere", None, "text")


MISTAKES = [
    ('{"text": "a"}\n{"body": "b"}\n', "a.jsonl: byte 14: no column 'text', found: body; set data.text_column"),
    ('{"text": "a"}\n{"text": 3}\n', "a.jsonl: byte 14: 'text' is 3, not text; correct or remove the row"),
    ('{"text": "a"}\n{"text": \n', "a.jsonl: byte 14: invalid JSON at column 10: "),
    ('{"text": "a"}\n[1]\n', "a.jsonl: byte 14: [1] is not a JSON object"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_a_broken_row_is_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError) as caught:
        documents(tmp_path / "a.jsonl", BUFFER)
    assert message in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert documents(tmp_path, BUFFER) == [["a", "b"]] * 2


def test_compressed_texts_are_streamed(tmp_path):
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(b"x y"))
    (tmp_path / "b.md").write_bytes(b"z")
    assert sum(documents(tmp_path, BUFFER), []) == ["x y", "z"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
def test_utf16_and_zstd_are_streamed(tmp_path, name):
    data = ('{"text": "größer"}\n' if "jsonl" in name else "größer").encode("utf-16")
    (tmp_path / name).write_bytes({"zst": zstd, ".gz": gzip.compress, "txt": bytes}[name[-3:]](data))
    assert documents(tmp_path / name, BUFFER) == [["größer"]]


@pytest.mark.parametrize("buffer_bytes", [100 * 16, BUFFER])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("".join(f'{{"text": "{n}"}}\n' for n in range(50)).encode("utf-16"), "UTF-16 by its byte-order mark, but"),
        ('{"text": "x"}\n'.encode("utf-16-le"), "bytes are 0, as in UTF-16"),
        (POINTER, "the file is a Git LFS pointer"),
    ],
)
def test_what_a_stream_cannot_cut(tmp_path, content, message, buffer_bytes):
    (tmp_path / "a.jsonl").write_bytes(content)
    pieces = stream_pieces.cut_into_chunks(stream_pieces.find_stream_files(str(tmp_path), None, "text"), buffer_bytes)
    for piece in pieces:  # whichever is read first
        with pytest.raises(DataError, match=f"a.jsonl: .*{message}"):
            list(stream_pieces.ChunkSource("x", (), "text", (piece,)).documents())


def test_a_streamed_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_pieces, "LONGEST_ROW", 1000)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "' + "a" * 2000)
    with pytest.raises(DataError, match="a.jsonl: byte 14: the row is longer than"):
        documents(tmp_path, BUFFER)


def test_a_parquet_pointer_in_a_stream(tmp_path):
    (tmp_path / "a.parquet").write_bytes(POINTER)
    with pytest.raises(DataError, match="a.parquet: the file is a Git LFS pointer"):
        documents(tmp_path, BUFFER)


def test_files_that_cannot_be_streamed_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match="a.csv: data.streaming reads only text, jsonl .also compressed. and parquet;"):
        stream_pieces.find_stream_files(str(tmp_path), None, "text")
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match="b.jsonl.gz: could not be read: "):
        documents(tmp_path / "b.jsonl.gz", BUFFER)


@pytest.fixture
def recipe_file(folder, made):
    data = {"validation_fraction": 0.1, "streaming": True, "shuffle_buffer_mib": 4 * BUFFER / 2**20}
    more = {"seed": 2, "steps": 30, "batch": {"global_batch_size": 4}, "schedule": {"warmup_steps": 2}}
    tokenizer = {"path": str(made / "tokenizer")}
    return tiny_recipes.recipe_file(folder, folder / "data", "pretrain", tokenizer=tokenizer, data=data, **more)


def test_a_stream_of_the_hub_reads_one_split_and_measures_another(recipe_file, monkeypatch):
    remote = fsspec.filesystem("memory")
    asked = []
    for split in ("train", "validation"):
        rows = "".join(json.dumps({"text": f"{split} {n}"}) + "\n" for n in range(50))
        remote.pipe_file(f"/hub_test/{split}.jsonl", rows.encode())

    def urls(where, selection):
        asked.append((where.name, selection.split, selection.config, selection.revision))
        return [f"memory://hub_test/{selection.split}.jsonl"]

    monkeypatch.setattr("samecurve.data.hub.hub_urls", urls)
    overrides = ["data.path=org/name", "data.validation_fraction=0", "data.revision=v1", "evaluate.split=validation"]
    task = registry.load_task(loader.load_recipe(recipe_file, overrides))
    assert asked == [("org/name", "train", None, "v1"), ("org/name", "validation", None, "v1")]
    seen = task.tokenizer.decode(task.train.make_block(0).stream.tokens.tolist())
    assert "train 7" in seen and "validation" not in seen
    held_out = task.tokenizer.decode(task.validation.stream.tokens.tolist())
    assert "validation 7" in held_out and "train" not in held_out and len(task.validation.stream.offsets) == 51


def batches(task, found, rank=0, world=1, **going_on) -> StepBatches:
    return StepBatches(task.train, found.seed, found.batch, (rank, world), found.steps, **going_on)


def read(steps: StepBatches) -> list[list[list[int]]]:
    """The rows of this rank, by step."""
    return [[row for m in step for row in m.inputs["input_ids"].tolist()] for step in steps]


def test_all_worlds_read_the_same_rows(recipe_file):
    found = loader.load_recipe(recipe_file)
    orders = []
    for world in (1, 2, 4):
        ranks = [read(batches(registry.load_task(found), found, rank, world)) for rank in range(world)]
        orders.append([sum((rank[step] for rank in ranks), []) for step in range(found.steps)])
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 30 and orders[0][0] != orders[0][1]


def test_an_epoch_trains_each_document_once_and_never_what_is_held_out(recipe_file, folder):
    found = loader.load_recipe(recipe_file)
    task = registry.load_task(found)
    seen = Counter()
    for block in range(task.train.blocks_per_epoch):
        rows = task.train.make_block(block)
        for start, end in zip(rows.stream.offsets[:-1], rows.stream.offsets[1:], strict=True):
            seen[task.tokenizer.decode(rows.stream.tokens[start:end].tolist(), skip_special_tokens=True)] += 1
    texts = list(sources.find_source(str(folder / "data")).documents())
    held_out = {text for text in texts if sources.is_held_out(text, 0.1)}
    assert seen == Counter(text for text in texts if text not in held_out) and held_out
    evaluated = task.tokenizer.decode(task.validation.stream.tokens.tolist(), skip_special_tokens=True)
    assert any(text in evaluated for text in held_out)


def test_a_run_goes_on_from_its_anchor_and_makes_no_block_before_it(recipe_file, folder, monkeypatch):
    found = loader.load_recipe(recipe_file)
    whole = read(batches(registry.load_task(found), found))
    for stop in (3, 19):
        first = batches(registry.load_task(found), found)
        going = iter(first)
        before = [next(going) for _ in range(stop)]
        anchor, samples = first.anchor, first.samples
        going.close()
        assert len(before) == stop and anchor["start"] <= samples == 4 * stop
        task = registry.load_task(found)
        (run,) = (folder / "cache" / "streams").iterdir()
        left = run / "00000001_of_a_session_that_was_killed"
        left.mkdir(exist_ok=True)
        made = []
        make = task.train.make_block
        monkeypatch.setattr(
            task.train, "make_block", lambda block, make=make, made=made: made.append(block) or make(block)
        )
        steps = batches(task, found, start_step=stop, start_samples=samples, anchor=anchor)
        assert not left.exists()
        assert read(steps) == whole[stop:]
        assert min(made) == anchor["block"] > 1
    assert read(batches(registry.load_task(found), found, start_step=19, start_samples=76)) == whole[19:]  # without one


def mixed(recipe_file: str, folder, *overrides: str):
    """A recipe of two streams, three rows of tables to one of texts."""
    parts = f"[{{path: {folder}/data, weight: 3}}, {{path: {folder}/texts, weight: 1}}]"
    return loader.load_recipe(recipe_file, ["data.path=null", f"data.mixture={parts}", *overrides])


def test_streams_are_mixed_by_weight_and_each_in_its_own_order(recipe_file, folder):
    found = mixed(recipe_file, folder)
    worlds = []
    for world in (1, 2):
        ranks = [read(batches(registry.load_task(found), found, rank, world)) for rank in range(world)]
        worlds.append([sum((rank[step] for rank in ranks), []) for step in range(found.steps)])
    assert worlds[0] == worlds[1]
    rows = sum(worlds[0], [])
    turns, _ = WeightedInterleaver([3, 1]).at(np.arange(len(rows)))
    assert (turns == 1).sum() == 30
    for source, name in enumerate(["data", "texts"]):
        seed, steps = found.seed + source, found.steps
        alone = loader.load_recipe(recipe_file, [f"data.path={folder / name}", f"seed={seed}", f"steps={steps}"])
        if source == 1:  # its epochs are single blocks, which are ordered so that no step has a row twice
            blocks = registry.load_task(alone).train.make_block(0)
            expected = sorted(map(tuple, blocks[np.arange(len(blocks))].inputs["input_ids"].tolist()))
            own = [tuple(rows[place]) for place in np.flatnonzero(turns == source)]
            assert sorted(own[: len(expected)]) == expected
        else:
            expected = sum(read(batches(registry.load_task(alone), alone)), [])
            own = [rows[place] for place in np.flatnonzero(turns == source)]
            assert own == expected[: len(own)]


def test_a_mixture_of_streams_goes_on_from_its_anchors(recipe_file, folder):
    found = mixed(recipe_file, folder)
    whole = read(batches(registry.load_task(found), found))
    first = batches(registry.load_task(found), found)
    for _ in itertools.islice(first, 19):
        pass
    assert not records.mismatch(first.anchor, resume._SCHEMA["anchor?"])
    task, made = registry.load_task(found), []
    make = task.train.parts[0].make_block
    task.train.parts[0].make_block = lambda block: made.append(block) or make(block)
    assert read(batches(task, found, start_step=19, start_samples=76, anchor=first.anchor)) == whole[19:]
    assert min(made) == first.anchor["sources"][0]["block"] > 1


def test_a_mixture_of_streams_is_described_and_held_out_by_source(recipe_file, folder):
    task = registry.load_task(mixed(recipe_file, folder))
    described = task.describe()
    assert described["source 0"]["weight"] == 0.75 and described["source 1"]["files"] == 25
    assert "epochs" not in described["source 0"]
    assert len(task.validation.parts) == 2 and len(task.validation.parts[0])
    twice = f"data.mixture=[{{path: {folder}/data, weight: 1}}, {{path: {folder}/data/../data, weight: 1}}]"
    with pytest.raises((ConfigurationError, DataError), match="has the same data as|already reads"):
        registry.load_task(loader.load_recipe(recipe_file, ["data.path=null", twice]))


def test_a_damaged_block_is_tokenised_again(recipe_file, folder):
    found = loader.load_recipe(recipe_file)
    expected = registry.load_task(found).train.make_block(0).stream.tokens.tolist()
    (file,) = (folder / "cache" / "streams").glob("*/00000000_*/train.bin")
    assert DAMAGES["zeros"](file)
    assert registry.load_task(found).train.make_block(0).stream.tokens.tolist() == expected


def test_disk_and_memory_hold_some_blocks_only(recipe_file, folder, monkeypatch, request):
    gc.freeze()  # a collection at each step would go through all that other tests and PyTorch left, for a minute
    request.addfinalizer(gc.unfreeze)
    found = loader.load_recipe(recipe_file, ["steps=100"])
    task = registry.load_task(found)
    make, in_memory = task.train.make_block, weakref.WeakSet()
    monkeypatch.setattr(task.train, "make_block", lambda block: in_memory.add(rows := make(block)) or rows)
    steps = batches(task, found)
    most = most_in_memory = 0
    for _ in steps:
        (run,) = (folder / "cache" / "streams").iterdir()
        most = max(most, len(list(run.iterdir())))
        gc.collect()
        most_in_memory = max(most_in_memory, len(in_memory))
    # of the 16 steps behind and those that are prepared; the first one, the one that is read and the one after it
    blocks_per_step = steps.anchor["block"] / 100
    assert most <= 20 * blocks_per_step + 4 < steps.anchor["block"] / 2
    assert 1 < most_in_memory <= 20 * blocks_per_step + 4


def test_every_row_is_read_once_before_any_is_read_again():
    """Blocks of 5, 0, 3 and 4 rows: what each position reads, worked out from the blocks alone."""

    def make(block: int) -> PackedRows:
        num_tokens = 4 * [5, 0, 3, 4][block % 4] + 1 if block % 4 != 1 else 0
        tokens = np.arange(num_tokens) + 1000 * block
        return PackedRows(token_store.TokenStream(tokens, np.array([0, num_tokens][: 1 + bool(num_tokens)]), "x"), 4, 0)

    rows = StreamRows(make, lambda block: None, 4, "fingerprint", {})
    rows.plan(seed=0, steps=Steps(2), num_steps=12, anchor={})
    firsts = rows[np.arange(24)].inputs["input_ids"][:, 0]
    assert [sorted(part.tolist()) for part in np.split(firsts, [5, 8, 12, 17, 20])] == [
        [0, 4, 8, 12, 16],
        [2000, 2004, 2008],
        [3000, 3004, 3008, 3012],
        [4000, 4004, 4008, 4012, 4016],
        [6000, 6004, 6008],
        [7000, 7004, 7008, 7012],
    ]
    assert rows.anchor(4) == {"block": 0, "start": 0} and rows.anchor(12) == {"block": 4, "start": 12}
    assert rows.num_inputs(np.arange(12)) == 12 * 4 + 0


def test_a_stream_keeps_no_more_blocks_the_longer_it_is_read():
    """Also not their bounds, which each step searches. Anchors are those of a stream that keeps all of them."""

    def rows_of(num_kept: int) -> StreamRows:
        blocks = [PackedRows(token_store.TokenStream(np.arange(21), np.array([0, 21]), "x"), 4, 0)]
        rows = StreamRows(lambda block: blocks[0], lambda block: None, 7, "fingerprint", {})
        rows.plan(seed=0, steps=Steps(2), num_steps=2000, anchor={})
        rows._kept = num_kept
        return rows

    rows, all_kept = rows_of(32), rows_of(10**9)
    for step in range(0, 2000, 3):
        positions = np.arange(2 * step, 2 * step + 2)
        assert (rows[positions].inputs["input_ids"] == all_kept[positions].inputs["input_ids"]).all()
        assert rows.anchor(2 * step) == all_kept.anchor(2 * step)
    assert len(all_kept._starts) > 700 and len(rows._starts) < 12


def test_a_stream_without_a_row_ends(tmp_path):
    empty = PackedRows(token_store.TokenStream(np.empty(0, dtype=np.uint16), np.array([0]), "x"), 4, 0)
    rows = StreamRows(lambda block: empty, lambda block: None, 3, "fingerprint", {})
    with pytest.raises(DataError, match="the stream has no training rows"):
        rows[np.arange(2)]


def test_a_mistake_in_a_later_block_is_raised_where_it_is_read(recipe_file, folder):
    with open(folder / "data" / "a.jsonl", "a") as file:
        file.write("\n{\n")
    found = loader.load_recipe(recipe_file)
    with pytest.raises(DataError, match="a.jsonl: byte .*: invalid JSON at column "):
        for step in batches(registry.load_task(found), found):
            assert step


def test_other_data_do_not_go_on(recipe_file, folder):
    before = registry.load_task(loader.load_recipe(recipe_file)).train.fingerprint
    assert registry.load_task(loader.load_recipe(recipe_file)).train.fingerprint == before
    assert (
        registry.load_task(loader.load_recipe(recipe_file, ["data.shuffle_buffer_mib=0.01"])).train.fingerprint
        != before
    )
    with open(folder / "data" / "a.jsonl", "a") as file:
        file.write("\n" + json.dumps({"text": "more"}))
    assert registry.load_task(loader.load_recipe(recipe_file)).train.fingerprint != before


def test_what_is_described(recipe_file):
    task = registry.load_task(loader.load_recipe(recipe_file))
    described = task.describe()
    assert described["train"]["files"] == 3 and described["train"]["blocks_per_epoch"] > 3
    labels = task.validation[np.arange(len(task.validation))].labels
    assert (labels != IGNORE_INDEX).sum() == task.validation.num_targets == described["held_out"]["trained_tokens"]
