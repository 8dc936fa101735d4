"""`data.streaming`: text that is tokenised while training goes on, into a folder that stays small."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from .. import corpus, sources, streaming
from ..cache import digest, location
from ..config import Recipe
from ..errors import DataError
from ..rows import Rows
from ..stream_rows import StreamRows
from . import parts


def load(recipe: Recipe, encoder: corpus.Encoder, make_rows: Callable[[corpus.TokenStream], Rows]) -> parts.Parts:
    """The first block is read now, so that most mistakes in the data are told before a model is loaded.

    What is held out are the first block's documents that are chosen by their content; others that are chosen are
    trained on nowhere, either. Errors: DataError for unusable data.
    """
    data, fraction = recipe.data, sources.held_out_fraction(recipe)
    files = streaming.find(data.path, data.pattern, data.text_column)
    buffer_bytes = data.shuffle_buffer_mib * 2**20
    pieces = streaming.cut(files, buffer_bytes)
    if not pieces:
        raise DataError(f"{data.path}: its files are empty; correct data.path or data.pattern")
    blocks = streaming.Blocks(pieces, buffer_bytes, recipe.seed)
    folder = _Folder(recipe)

    def read(block: int) -> corpus.Corpus:
        source = streaming.PieceSource(data.path, (), data.text_column, blocks[block])
        key = digest(data.text_column, fraction, encoder.identity, *map(astuple, source.pieces))
        return corpus.load_into(folder.of(block, key), key, source, encoder, fraction)

    first = read(0)
    read_as = (data.text_column, data.shuffle_buffer_mib, fraction, encoder.identity)
    fingerprint = digest(streaming.fingerprint(files), *read_as)
    facts = {
        "files": len(files),
        "megabytes": round(sum(file.size for file in files) / 1e6, 1),
        "blocks_per_epoch": blocks.per_epoch,
        "first_block_documents": len(first.train.offsets) - 1,
        "first_block_tokens": len(first.train.tokens),
    }
    train = StreamRows(lambda block: make_rows(read(block).train), folder.drop, blocks.per_epoch, fingerprint, facts)
    held_out = None
    if recipe.evaluate.path is not None:
        source = sources.find(recipe.evaluate.path, data.pattern, data.text_column)
        held_out = make_rows(corpus.load(source, encoder, 0.0, location(data.cache_dir)).train)
    elif fraction > 0:
        held_out = make_rows(first.held_out)
    if held_out is not None and not len(held_out):
        raise DataError(
            f"{recipe.evaluate.path or data.path}: no document is held out (data.held_out_fraction={fraction:g} of the "
            f"{len(first.train.offsets) - 1} documents of the first block); raise it, or data.shuffle_buffer_mib, or "
            "set evaluate.path"
        )
    return parts.Parts(train, held_out, first.empty_documents, {})


class _Folder:
    """Where the blocks of a run lie: the first one, for what is held out, and those about the position that is read.

    Each run has its own, because it takes away what it does not need any more; the first process of each machine does.
    """

    def __init__(self, recipe: Recipe):
        run = digest(str(Path(recipe.output_dir).absolute()))
        self._path = location(recipe.data.cache_dir) / "streams" / run
        self._clears = os.environ.get("LOCAL_RANK", "0") == "0"

    def of(self, block: int, key: str) -> Path:
        return self._path / f"{block:08d}_{key}"

    def drop(self, before: int) -> None:
        for folder in self._path.glob("[0-9]*_*") if self._clears else ():
            if 0 < int(folder.name.split("_")[0]) < before:
                shutil.rmtree(folder, ignore_errors=True)
