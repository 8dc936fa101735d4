"""Token cache: tokenises documents once, keyed by their content, and reads the tokens through memory maps."""

from __future__ import annotations

import array
import io
import json
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from samecurve.data.columns import Columns
from samecurve.data.encoder import Encoded, Encoder, encoded
from samecurve.data.row_checks import BadRow, BadRows
from samecurve.data.sources import DataSource, fingerprint, fraction_of_one, is_held_out
from samecurve.errors import StorageError
from samecurve.specs.data_names import BAD_ROWS
from samecurve.storage.cache import (
    BLOCK_BYTES,
    DamagedEntryError,
    FinishedEntry,
    NewEntry,
    build_once,
    digest,
    is_main_process,
)
from samecurve.storage.terminal import progress_bar

# Part of the cache key: raise it when the tokens written for the same input change.
_VERSION = 8
_BATCH_CHARACTERS = 1 << 20
_ENOUGH_BAD_ROWS = 1000  # so many end a run without counting the others
_LARGE_BYTES = 1 << 30  # larger token files are verified block by block; smaller ones as a whole, in 0.1 s
PARTS = ("train", "held_out")
_BESIDE: dict[str, np.dtype] = {
    **dict.fromkeys(("trained", "segments"), np.dtype(np.uint8)),
    **{"weights": np.dtype(np.float32), "tags": np.dtype(np.int16)},
}


@dataclass(frozen=True)
class TokenStream:
    """Concatenated tokens of all documents of one part.

    A document is [begin-of-text] text end-of-text, or whatever the encoder returns for it.

    Attributes:
        tokens: (num_tokens,), unsigned integers.
        offsets: (num_documents + 1,) int64, the start of each document, then num_tokens.
        fingerprint: changes when the tokens do.
        trained: (num_tokens,) uint8, 1 for tokens that are targets; None if all tokens are.
        segments: (num_tokens,) uint8, index of the text within its document that a token is from.
        labels: (num_documents,) int64, class of each document, or (num_documents, k) float64, k numbers.
        weights: (num_tokens,) float32, of the tokens' losses; None: all are 1.
        tags: (num_tokens,) int16, class of each token, IGNORE_INDEX for tokens without one.
    """

    tokens: np.ndarray | VerifiedTokens
    offsets: np.ndarray
    fingerprint: str
    trained: np.ndarray | None = None
    segments: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    tags: np.ndarray | None = None


@dataclass(frozen=True)
class Corpus:
    """Tokens of a source, split into training and held-out documents.

    Attributes:
        train: documents to train on.
        held_out: held-out documents.
        empty_documents: number of documents that were dropped because they hold no token.
        counts: the encoder's counts by name.
        columns: what is read of the rows.
        num_bad_rows: number of rows that were dropped because they cannot be used.
        bad_rows: file with a line for each of them.
    """

    train: TokenStream
    held_out: TokenStream
    empty_documents: int
    counts: dict[str, int]
    columns: Columns
    num_bad_rows: int
    bad_rows: Path


class VerifiedTokens:
    """Tokens in a large file, (num_tokens,), of which each block is verified before it is first read.

    Indexing returns arrays. The processes of a data loader, which are forks, share what is verified.

    Raises StorageError, when indexed, for a damaged block.
    """

    def __init__(self, entry: FinishedEntry, name: str, dtype: np.dtype):
        num_blocks = len(entry.hashes(name).blocks)
        self._entry, self._name, self._per_block = entry, name, BLOCK_BYTES // dtype.itemsize
        self._tokens = np.memmap(entry.folder / name, dtype=dtype, mode="r")
        self._verified = np.frombuffer(mmap.mmap(-1, num_blocks), dtype=bool)  # in memory that forks share
        self._all_verified = False

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if not self._all_verified:
            if isinstance(index, slice):
                start, stop, step = index.indices(len(self))
                assert step == 1  # nobody asks for others
                blocks = np.arange(start // self._per_block, -(-stop // self._per_block))
            else:
                blocks = np.asarray(index) // self._per_block
            wanted = np.unique(blocks[~self._verified[blocks]])
            for block in wanted.tolist():
                tokens = self._tokens[block * self._per_block :][: self._per_block]
                try:
                    self._entry.check_block(self._name, block, tokens)
                except DamagedEntryError as error:
                    self._entry.condemn()
                    raise StorageError(
                        f"{self._entry.folder}: {error}; start the run again, which tokenizes the data anew; if this "
                        "message comes again, delete the folder first"
                    ) from error
                self._verified[block] = True
            self._all_verified = not len(wanted) and bool(self._verified.all())
        return self._tokens[index]


class DocumentEncoder(Encoder):
    """Encodes plain texts. Special tokens within a text are encoded as text."""

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Return [begin-of-text] text end-of-text for each text; [] for a text without a token."""
        # the fast variant keeps no offsets, which only spans of trained text need
        encodings = self._rust.encode_batch_fast(texts, add_special_tokens=False)
        return [[*self._begin, *e.ids, *self._end] if e.ids else [] for e in encodings]

    def encode(self, documents: list[str]) -> list[Encoded]:
        self._count_special(documents)
        return [Encoded(tokens) for tokens in self(documents)]


def load_corpus(source: DataSource, encoder: Encoder, validation_fraction: float, cache: Path) -> Corpus:
    """Load the tokens of a source from the cache, or tokenise it now.

    Args:
        validation_fraction: fraction of the documents to hold out, in [0, 1).

    Raises:
        DataError: for unusable data.
        StorageError: when the cache cannot be written.
    """
    dropped = ["without bad rows"] if source.selection.drop_bad_rows else []
    settings = [source.identity, *dropped, validation_fraction, encoder.identity]
    key = digest(_VERSION, fingerprint(source, cache), *settings)
    return load_corpus_into(cache / "tokens" / key, key, source, encoder, validation_fraction)


def load_corpus_into(
    target: Path, key: str, source: DataSource, encoder: Encoder, validation_fraction: float
) -> Corpus:
    """Load or tokenise a source as `load_corpus` does, in a given folder.

    Args:
        target: folder of these tokens; created if it does not exist.
        key: digest that changes when the tokens do; becomes part of the fingerprints of both streams.
        validation_fraction: fraction of the documents to hold out, in [0, 1).
    """
    build = partial(_write, source=source, encoder=encoder, validation_fraction=validation_fraction)
    corpus = build_once(target, build, partial(_open, key=key))
    # the tokens may be of a run with other data.ignore_columns
    source.refuse_lost_content(corpus.columns, encoder.reads)
    return corpus


def place_of(source: DataSource, encoder: Encoder, part: str, validation_fraction: float, index: int) -> str:
    """Return where document `index` of a part ("train" or "held_out") is in its source, for a message.

    Tokenises the documents before it again.
    """
    for entries, encodings in encoded(encoder, _batches(source.entries()), source.num_bytes):
        for entry, one in zip(entries, encodings, strict=True):
            if isinstance(one, BadRow) or not len(one.tokens):
                continue
            if is_held_out(entry, validation_fraction) == (part == "held_out"):
                if index <= len(one.more):
                    return getattr(entry, "place", f"{source.name}: the document that begins with {str(entry)[:40]!r}")
                index -= 1 + len(one.more)
    return source.name  # the files have changed meanwhile


def training_texts(source: DataSource, validation_fraction: float) -> Iterator[str]:
    """Yield the texts of all training documents. A tokenizer may learn from these only."""
    validation_fraction = fraction_of_one(source, validation_fraction)
    for document in source.documents():
        if not is_held_out(document, validation_fraction):
            yield from source.texts(document)


def _write(files: NewEntry, source: DataSource, encoder: Encoder, validation_fraction: float) -> None:
    columns = source.check()
    source.refuse_lost_content(columns, encoder.reads)
    # a task has one encoder for all its sources, whose counts go on
    num_empty, num_rows, before = 0, 0, dict(encoder.counts)
    with ExitStack() as stack:
        bad_rows = stack.enter_context(io.TextIOWrapper(files.create(BAD_ROWS), encoding="utf-8"))
        bad = BadRows(source.name, source.selection.drop_bad_rows, bad_rows)
        writers = {part: stack.enter_context(_Writer(files, part, encoder)) for part in PARTS}
        advance = stack.enter_context(reading("tokenising", source))
        for entries, results in encoded(encoder, _batches(source.entries()), source.num_bytes):
            for entry, one in zip(entries, results, strict=True):
                if isinstance(one, BadRow):
                    bad.add(one)
                elif not len(one.tokens):
                    num_empty += 1
                else:
                    part = "held_out" if is_held_out(entry, validation_fraction) else "train"
                    for document in (one, *one.more):
                        writers[part].append(document)
            advance([entry for entry in entries if not isinstance(entry, BadRow)])
            num_rows += len(entries)
            if bad.count >= _ENOUGH_BAD_ROWS and not source.selection.drop_bad_rows:
                bad.check(num_rows, complete=False)
        bad.check(num_rows)
    counts = {part: writers[part].offsets[-1] for part in PARTS}
    counted = {name: count - before[name] for name, count in encoder.counts.items()}
    counted = {name: count for name, count in counted.items() if count or name not in encoder.rare}
    meta = {
        "source": source.name,
        "dtype": encoder.dtype.name,
        "beside": encoder.token_arrays,
        "labelled": encoder.labelled,
        "num_tokens": counts,
        "empty_documents": num_empty - counted.get("too_long_documents", 0),
        "bad_rows": bad.count,
        "columns": columns.as_dict(),
        "counts": counted,
    }
    files.write("meta.json", json.dumps(meta).encode())


class _Writer:
    """Writes the files of one part: tokens, trained marks and segments as they come, offsets and labels at the end."""

    def __init__(self, entry: NewEntry, part: str, encoder: Encoder):
        self.offsets = array.array("q", [0])
        self.labels: list | None = [] if encoder.labelled else None
        self._dtype, self._entry, self._part = encoder.dtype, entry, part
        self._tokens = entry.create(f"{part}.bin")
        self._beside = {name: entry.create(f"{part}_{name}.bin") for name in encoder.token_arrays}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._tokens, *self._beside.values()):
            file.close()
        for name, values in (("offsets", self.offsets), ("labels", self.labels)):
            if error is None and values is not None:  # after an error build_once removes the folder
                with self._entry.create(f"{self._part}_{name}.npy") as file:
                    np.save(file, np.array(values, None if len(values) else np.int64))

    def append(self, encoded: Encoded) -> None:
        self._tokens.write(np.asarray(encoded.tokens, dtype=self._dtype))
        for name, file in self._beside.items():
            file.write(np.asarray(getattr(encoded, name), dtype=_BESIDE[name]))
        if self.labels is not None:
            assert encoded.label is not None  # the encoder is labelled
            self.labels.append(encoded.label)
        self.offsets.append(self.offsets[-1] + len(encoded.tokens))


def _batches(documents: Iterator) -> Iterator[list]:
    """Group documents into lists that are large enough to occupy the tokenizer's own threads on every core."""
    batch: list = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(str(document))
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open(entry: FinishedEntry, key: str) -> Corpus:
    """Map the files of a finished entry. Raises DamagedEntryError."""
    meta = json.loads(entry.read("meta.json"))
    streams = []
    for part in PARTS:
        num_tokens = meta["num_tokens"][part]
        offsets = np.load(entry.path(f"{part}_offsets.npy"), mmap_mode="r")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != num_tokens or (offsets[1:] < offsets[:-1]).any():
            raise DamagedEntryError(
                f"{part}_offsets.npy does not rise from 0 to the {num_tokens:,} tokens of meta.json"
            )
        arrays = {name: _map_file(entry, f"{part}_{name}.bin", _BESIDE[name], num_tokens) for name in meta["beside"]}
        if meta["labelled"]:
            arrays["labels"] = np.load(entry.path(f"{part}_labels.npy"), mmap_mode="r")
        tokens = _map_file(entry, f"{part}.bin", np.dtype(meta["dtype"]), num_tokens, _LARGE_BYTES)
        streams.append(TokenStream(tokens, offsets, digest(key, part), **arrays))
    train, held_out = streams
    columns, bad_rows = Columns.of(meta["columns"]), entry.path(BAD_ROWS)
    return Corpus(train, held_out, meta["empty_documents"], meta["counts"], columns, meta["bad_rows"], bad_rows)


def _map_file(entry: FinishedEntry, name: str, dtype: np.dtype, num_tokens: int, most_bytes: float = math.inf) -> Any:
    """Map a file with a value per token: VerifiedTokens if it has more than `most_bytes`, else an array."""
    size = entry.hashes(name).size
    if size != num_tokens * dtype.itemsize:
        raise DamagedEntryError(f"{name} does not hold the {num_tokens:,} tokens of meta.json")
    if size > most_bytes:
        return VerifiedTokens(entry, name, dtype)
    file = entry.path(name)
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if num_tokens else np.empty(0, dtype=dtype)


@contextmanager
def reading(title: str, source: DataSource, units: str = "documents") -> Iterator[Callable[[list], None]]:
    """Show progress in reading a source, in bytes of its files: exact for text files, approximate for tables.

    Yields a function to call with each batch of documents, which are counted as `units`.
    """
    began, num_units, num_bytes = time.perf_counter(), 0, 0

    def line() -> str:
        seconds = time.perf_counter() - began
        return f"{title} {source.name}: {num_units:,} {units}, {num_bytes / 1e6:.1f} MB in {seconds:.1f} s"

    with progress_bar(title, source.num_bytes, line, source.quiet or not is_main_process()) as advance:

        def read(documents: list) -> None:
            nonlocal num_units, num_bytes
            size = sum(len(str(document).encode()) for document in documents)
            num_units, num_bytes = num_units + len(documents), num_bytes + size
            advance(size)

        yield read
