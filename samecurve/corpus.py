"""Documents to tokens, once: the token cache, found again by its content and read through memory maps."""

from __future__ import annotations

import array
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .cache import cached, digest, prints
from .errors import DataError
from .sources import Source, fingerprint, is_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Part of the cache key: raise it when the tokens written for the same input change.
_VERSION = 1
_BATCH_CHARACTERS = 1 << 20
_PLAIN_LINE_SECONDS = 30.0
PARTS = ("train", "held_out")


@dataclass(frozen=True)
class TokenStream:
    """All documents of one part, one after the other: [begin-of-text] text end-of-text.

    tokens: (num_tokens,), unsigned. offsets: (num_documents + 1,) int64, where each document starts, then num_tokens.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    fingerprint: str


@dataclass(frozen=True)
class Corpus:
    """empty_documents: how many were dropped because they hold no text."""

    train: TokenStream
    held_out: TokenStream
    empty_documents: int


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id: a vocabulary may have gaps, and then its length says too little."""
    return max(tokenizer.get_vocab().values()) + 1


class DocumentEncoder:
    """Texts to the token ids of documents, with a copy of the tokenizer's Rust part.

    The copy reads special tokens that stand in a text as text, and neither truncates nor pads. It uses every core.
    DataError for a tokenizer without such a part or without an end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        from tokenizers import Tokenizer

        if not hasattr(tokenizer, "backend_tokenizer"):
            raise DataError(f"{tokenizer.name_or_path}: only fast tokenizers (with a tokenizer.json) are supported")
        if tokenizer.eos_token_id is None:
            raise DataError(f"{tokenizer.name_or_path}: no eos_token; name one in tokenizer_config.json")
        self._begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._end = [tokenizer.eos_token_id]
        self._rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = True
        self.identity = digest(self._rust.to_str(), self._begin, self._end)
        self.dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """[begin-of-text] text end-of-text for each text; [] for one without a token."""
        encodings = self._rust.encode_batch_fast(texts, add_special_tokens=False)
        return [[*self._begin, *e.ids, *self._end] if e.ids else [] for e in encodings]


def load(source: Source, encoder: DocumentEncoder, held_out_fraction: float, cache: Path) -> Corpus:
    """The tokens of a source, from the cache or made now.

    Errors: DataError for unusable data, StorageError when the cache cannot be written.
    """
    key = digest(_VERSION, fingerprint(source, cache), source.text_column, held_out_fraction, encoder.identity)
    build = partial(_write, source=source, encoder=encoder, held_out_fraction=held_out_fraction)
    directory = cached(cache / "tokens" / key, build)
    meta = json.loads((directory / "meta.json").read_text())
    train, held_out = (_map(directory, part, meta, key) for part in PARTS)
    return Corpus(train, held_out, meta["empty_documents"])


def training_documents(source: Source, held_out_fraction: float) -> Iterator[str]:
    """The documents that are trained on, which are also the only ones that a tokenizer may learn from."""
    return (text for text in source.documents() if not is_held_out(text, held_out_fraction))


def _write(directory: Path, source: Source, encoder: DocumentEncoder, held_out_fraction: float) -> None:
    offsets = {part: array.array("q", [0]) for part in PARTS}
    num_empty = 0
    with ExitStack() as stack:
        files = {part: stack.enter_context(open(directory / f"{part}.bin", "wb")) for part in PARTS}
        advance = stack.enter_context(reading("tokenising", source))
        for texts in _batches(source.documents()):
            for text, tokens in zip(texts, encoder(texts), strict=True):
                if not tokens:
                    num_empty += 1
                    continue
                part = "held_out" if is_held_out(text, held_out_fraction) else "train"
                np.asarray(tokens, dtype=encoder.dtype).tofile(files[part])
                offsets[part].append(offsets[part][-1] + len(tokens))
            advance(texts)
    for part in PARTS:
        np.save(directory / f"{part}_offsets.npy", np.frombuffer(offsets[part], dtype=np.int64))
    counts = {part: offsets[part][-1] for part in PARTS}
    meta = {"source": source.name, "dtype": encoder.dtype.name, "num_tokens": counts, "empty_documents": num_empty}
    (directory / "meta.json").write_text(json.dumps(meta))


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents large enough for the tokenizer's own threads, which use every core."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _map(directory: Path, part: str, meta: dict, key: str) -> TokenStream:
    file, dtype, num_tokens = directory / f"{part}.bin", np.dtype(meta["dtype"]), meta["num_tokens"][part]
    if not file.is_file() or file.stat().st_size != num_tokens * dtype.itemsize:
        raise DataError(f"{file}: does not hold the {num_tokens} tokens that meta.json states; delete {directory}")
    # An empty file cannot be mapped.
    tokens = np.memmap(file, dtype=dtype, mode="r") if num_tokens else np.empty(0, dtype=dtype)
    return TokenStream(tokens, np.load(directory / f"{part}_offsets.npy", mmap_mode="r"), digest(key, part))


@contextmanager
def reading(title: str, source: Source) -> Iterator[Callable[[list[str]], None]]:
    """Shows how far the documents of a source are read: a bar on a terminal, else a line every 30 s and one at the
    end.

    Gives a function to call with each batch of texts. The bar's end is the size of the files, so it is exact for text
    files and a guide for tables.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(quiet=not prints(), soft_wrap=True)
    began = last_line = time.perf_counter()
    num_documents = num_bytes = 0

    def line() -> str:
        seconds = time.perf_counter() - began
        return f"{title} {source.name}: {num_documents:,} documents, {num_bytes / 1e6:.1f} MB in {seconds:.1f} s"

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=source.num_bytes)

        def advance(texts: list[str]) -> None:
            nonlocal num_documents, num_bytes, last_line
            size = sum(len(text.encode()) for text in texts)
            num_documents, num_bytes = num_documents + len(texts), num_bytes + size
            bar.advance(task, size)
            if not console.is_terminal and time.perf_counter() - last_line > _PLAIN_LINE_SECONDS:
                last_line = time.perf_counter()
                console.print(line(), highlight=False)

        yield advance
    console.print(line(), highlight=False)
