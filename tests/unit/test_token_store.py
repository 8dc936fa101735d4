from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pyarrow.parquet
import pytest
from file_damage import DAMAGES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from samecurve.data import sources, token_store
from samecurve.data.encoder import Encoded
from samecurve.errors import DataError, StorageError
from samecurve.storage import cache
from samecurve.storage.filesystem import LocalFileSystem


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Words to ids, and two special tokens."""
    vocabulary = {word: index for index, word in enumerate(["?", "a", "b", "c", "<", "s", ">", "<s>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.enable_truncation(2)  # as some published tokenizer.json files have it
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(bos_token="<s>", eos_token="</s>")


def write(folder, *texts: str) -> sources.DataSource:
    folder.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:03}.txt").write_text(text)
    return sources.find_source(str(folder))


def documents(stream: token_store.TokenStream) -> list[list[int]]:
    return [part.tolist() for part in np.split(stream.tokens, stream.offsets[1:-1])]


def test_documents_carry_their_begin_and_end_tokens(tmp_path, tokenizer):
    source = write(tmp_path / "data", "a b c", " ", "c", "<s> a")
    loaded = token_store.load_corpus(source, token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache")
    assert documents(loaded.train) == [[7, 1, 2, 3, 8], [7, 3, 8], [7, 4, 5, 6, 1, 8]]
    assert loaded.empty_documents == 1
    assert (len(loaded.held_out.tokens), loaded.held_out.offsets.tolist()) == (0, [0])


def test_a_tokenizer_without_a_begin_token(tmp_path):
    encoder = token_store.DocumentEncoder(make_tokenizer(eos_token="</s>"))
    assert encoder(["a b", ""]) == [[1, 2, 8], []]


def test_a_tokenizer_without_an_end_token():
    with pytest.raises(DataError, match="no eos_token"):
        token_store.DocumentEncoder(make_tokenizer())


def test_the_held_out_part_is_disjoint_and_complete(tmp_path, tokenizer):
    texts = ["a " * n for n in range(1, 60)]
    source = write(tmp_path / "data", *texts, *texts)
    loaded = token_store.load_corpus(source, token_store.DocumentEncoder(tokenizer), 0.3, tmp_path / "cache")
    train, held_out = ([len(d) - 2 for d in documents(part)] for part in (loaded.train, loaded.held_out))
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted([*range(1, 60), *range(1, 60)])
    assert len(held_out) > 10
    taught = list(token_store.training_texts(source, 0.3))
    assert [text.count("a") for text in taught] == train


def test_the_second_load_reads_the_cache(tmp_path, tokenizer, monkeypatch):
    source, encoder = write(tmp_path / "data", "a b", "c"), token_store.DocumentEncoder(tokenizer)
    first = token_store.load_corpus(source, encoder, 0.0, tmp_path / "cache")
    monkeypatch.setattr(sources.DataSource, "documents", lambda self: pytest.fail("read again"))
    second = token_store.load_corpus(source, encoder, 0.0, tmp_path / "cache")
    assert documents(second.train) == documents(first.train)
    assert second.train.fingerprint == first.train.fingerprint


@pytest.mark.parametrize("change", ["text", "fraction", "eos", "nothing"])
def test_what_the_cache_is_keyed_by(tmp_path, tokenizer, change):
    write(tmp_path / "data", "a b", "c")
    token_store.load_corpus(
        sources.find_source(str(tmp_path / "data")), token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache"
    )
    if change == "text":
        (tmp_path / "data" / "000.txt").write_text("a c")
    encoder = token_store.DocumentEncoder(
        make_tokenizer(bos_token="<s>", eos_token="c") if change == "eos" else tokenizer
    )
    fraction = 0.5 if change == "fraction" else 0.0
    token_store.load_corpus(sources.find_source(str(tmp_path / "data")), encoder, fraction, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == (1 if change == "nothing" else 2)


class EveryArray(token_store.DocumentEncoder):
    """Writes every file that a token cache can have."""

    masked = segmented = labelled = True

    def encode(self, documents):
        arrays = [np.arange(len(tokens)) % 2 for tokens in self(documents)]
        return [Encoded(tokens, a, a, label=5) for tokens, a in zip(self(documents), arrays, strict=True)]


def arrays_of(corpus: token_store.Corpus) -> list:
    parts = (corpus.train, corpus.held_out)
    arrays = [array for p in parts for array in (p.tokens[:], p.offsets, p.trained, p.segments, p.labels)]
    return [*(array.tolist() for array in arrays), corpus.counts, corpus.columns, corpus.bad_rows.read_bytes()]


FILES = ["bad_rows.jsonl", "files.json", "meta.json"] + [
    f"{part}{suffix}"
    for part in token_store.PARTS
    for suffix in (".bin", "_trained.bin", "_segments.bin", "_offsets.npy", "_labels.npy")
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A function that loads a corpus, its cache, and what the arrays should be."""
    folder = tmp_path_factory.mktemp("built")
    encoder = EveryArray(make_tokenizer(bos_token="<s>", eos_token="</s>"))
    source = write(folder / "data", *["a " * n for n in range(1, 60)])

    def load():
        return token_store.load_corpus(source, encoder, 0.3, folder / "cache")

    expected = arrays_of(load())
    (entry,) = (folder / "cache" / "tokens").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == sorted(FILES)
    return load, entry, expected


WHOLE = ["files.json", "meta.json", "train.bin"]  # each kind of file with every damage, the others with one


@pytest.mark.parametrize(
    ("name", "damage"), [*product(WHOLE, DAMAGES), *((name, "last bit") for name in FILES if name not in WHOLE)]
)
def test_a_damaged_file_is_built_again(built, name, damage, capsys, monkeypatch):
    monkeypatch.setattr(LocalFileSystem, "sync", lambda self, file: None)  # ten times as fast
    load, entry, expected = built
    if not DAMAGES[damage](entry / name):
        return  # an empty file is as it was
    assert arrays_of(load()) == expected
    line = f"{entry}: {name} "
    out = capsys.readouterr().out
    assert out.startswith(line) and out.count("the cache is built again") == 1
    assert arrays_of(load()) == expected and capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", ["reordered", "zeroed"])
@pytest.mark.parametrize("large", [False, True])
def test_tokens_changed_in_place_are_never_read(built, damage, large, monkeypatch):
    load, entry, expected = built
    tokens = np.memmap(entry / "train.bin", dtype=np.uint16, mode="r+")
    tokens[:] = tokens[::-1].copy() if damage == "reordered" else 0
    tokens.flush()
    if large:
        monkeypatch.setattr(token_store, "_LARGE_BYTES", 0)
        stream = load().train
        with pytest.raises(StorageError, match=f"{entry}: train.bin differs .* start the run again"):
            stream.tokens[np.array([3])]
    assert arrays_of(load()) == expected


def test_large_files_are_verified_block_by_block(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_store, "_LARGE_BYTES", 0)
    for module in (token_store, cache):
        monkeypatch.setattr(module, "BLOCK_BYTES", 8)  # 4 tokens
    source = write(tmp_path / "data", *["a b", "b c", "c a b"] * 5)
    tokens = token_store.load_corpus(
        source, token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache"
    ).train.tokens
    checked = []
    check = cache.FinishedEntry.check_block
    monkeypatch.setattr(
        cache.FinishedEntry,
        "check_block",
        lambda self, *block: checked.append(block[1]) or check(self, *block),
    )
    whole = [7, 1, 2, 8, 7, 2, 3, 8, 7, 3, 1, 2, 8] * 5
    assert tokens[5:9].tolist() == whole[5:9] and tokens[np.array([[4], [13]])].tolist() == [[whole[4]], [whole[13]]]
    assert checked == [1, 2, 3]
    if not os.fork():  # as a process of a data loader
        tokens[0:4]
        os._exit(0)
    os.wait()
    tokens[0:8]
    assert checked == [1, 2, 3]
    assert tokens[:].tolist() == tokens[:].tolist() == whole
    assert checked == [*range(1, 17)] and len(tokens) == 65


@pytest.mark.parametrize("offsets", [[], [1, 4], [0, 3, 2, 4], [0, 3], [0, 5]])
def test_offsets_that_do_not_cover_the_tokens_are_refused(tmp_path, tokenizer, monkeypatch, offsets):
    save = np.save
    monkeypatch.setattr(np, "save", lambda file, values: save(file, offsets if "train" in file.name else values))
    source, encoder = write(tmp_path / "data", "a b"), token_store.DocumentEncoder(tokenizer)
    with pytest.raises(StorageError, match="train_offsets.npy does not rise from 0 to the 4 tokens"):
        token_store.load_corpus(source, encoder, 0.0, tmp_path / "cache")


def test_large_inputs_are_encoded_in_several_batches(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_store, "_BATCH_CHARACTERS", 6)
    source = write(tmp_path / "data", *["a b", "b c", "c"] * 5)
    loaded = token_store.load_corpus(source, token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache")
    assert documents(loaded.train) == [[7, 1, 2, 8], [7, 2, 3, 8], [7, 3, 8]] * 5


def test_progress_is_one_line_where_there_is_no_terminal(tmp_path, tokenizer, capsys, monkeypatch):
    token_store.load_corpus(
        write(tmp_path / "d", "a b", "c"), token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache"
    )
    out = capsys.readouterr().out
    assert out.startswith(f"tokenising {tmp_path / 'd'}: 2 documents, 0.0 MB in ")
    assert out.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    token_store.load_corpus(write(tmp_path / "e", "b"), token_store.DocumentEncoder(tokenizer), 0.0, tmp_path / "cache")
    assert capsys.readouterr().out == ""


def test_a_cached_corpus_needs_no_datasets(tmp_path, tokenizer):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b"]}), tmp_path / "a.parquet")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    program = f"""
import pathlib, sys
from transformers import AutoTokenizer
from samecurve.data import sources
from samecurve.data import token_store as corpus
encoder = corpus.DocumentEncoder(AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r}))
source = sources.find_source({str(tmp_path / "a.parquet")!r})
loaded = corpus.load_corpus(source, encoder, 0.0, pathlib.Path({str(tmp_path / "cache")!r}))
print(loaded.train.tokens.tolist(), "datasets" in sys.modules)
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout.splitlines()[-1] for run in runs] == ["[7, 1, 2, 8] False"] * 2, runs[0].stderr
