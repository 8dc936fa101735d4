"""Base of the tasks that train a causal language model on tokens: loss, metrics and data loading.

With `data.streaming`, text is tokenised block by block during training. The folder of the tokenised blocks stays small,
because blocks that are no longer needed are deleted.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.data import sources, stream_pieces, token_store, tokenizer
from samecurve.data.datasets.base import DocumentRows, Rows
from samecurve.data.datasets.mixture import JoinedRows
from samecurve.data.datasets.streaming import MixedStreams, StreamRows
from samecurve.data.encoder import Encoder
from samecurve.data.selection import Selection
from samecurve.errors import DataError
from samecurve.specs.data_names import address
from samecurve.specs.heads import Head
from samecurve.storage.cache import cache_folder, digest
from samecurve.tasks import splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from samecurve.config.schema import Data, Recipe
    from samecurve.interfaces.engine import EvalResult


@dataclass
class CausalTask(splits.LoadedTask[Rows]):
    """Next-token prediction, for pretraining and fine-tuning.

    Attributes:
        details: further entries of `describe`, about the data.
    """

    head = Head()
    by_token = True
    details: dict[str, object] = field(default_factory=dict)

    @property
    def special_tokens(self) -> dict[str, int]:
        # Without pad_token_id: the config of a causal language model needs none.
        return {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id")}

    def metrics(self, result: EvalResult) -> dict[str, float]:
        """Return eval_loss in nats per token, eval_perplexity, eval_bits_per_byte and eval_tokens.

        Bits per byte are comparable between tokenizers of different vocabularies.
        """
        result.check(self.eval_rows.num_targets, "tokens")
        return {
            "eval_loss": result.loss,
            "eval_perplexity": result.perplexity,
            "eval_bits_per_byte": result.loss * result.tokens / math.log(2) / self._num_eval_bytes,
            "eval_tokens": result.tokens,
        }

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **self.details}

    @cached_property
    def _num_eval_bytes(self) -> int:
        return self.eval_rows.target_bytes(tokenizer.byte_lengths(self.tokenizer))


def load_causal_task(
    recipe: Recipe,
    text_tokenizer: PreTrainedTokenizerFast,
    encoder: Encoder,
    find_source: Callable[[Data], sources.DataSource],
    packed: Callable[[token_store.TokenStream, int, int], Rows],
) -> CausalTask:
    """Load the rows of one data set, a mixture or a stream. Arguments and errors: see `splits.load_splits`.

    `packed` makes rows of (stream, sequence length, padding token) where the recipe packs documents.
    """

    def make_rows(stream: token_store.TokenStream) -> Rows:
        padding_token = splits.token_id(text_tokenizer, "eos")
        if recipe.data.packing:
            return packed(stream, recipe.batch.sequence_length, padding_token)
        return splits.padded_rows(recipe, DocumentRows, stream, padding_token, recipe.data.truncation)

    if recipe.data.streaming:
        loaded = load_stream(recipe, encoder, make_rows)
    else:
        loaded = splits.load_splits(recipe, encoder, find_source, make_rows)
    return CausalTask(text_tokenizer, loaded, splits.describe_sources(recipe, loaded))


def load_tokenizer(recipe: Recipe, find_source: Callable[[Data], sources.DataSource]) -> PreTrainedTokenizerFast:
    """Load the recipe's tokenizer, or train it on all training documents. Raises as `tokenizer.load_tokenizer` does."""
    return tokenizer.load_tokenizer(recipe, lambda data: splits.find_all_sources(recipe, find_source))


@dataclass(frozen=True)
class _Stream:
    """One streamed data set: its training rows, the tokens of its first block, and its origin, if it is of the hub."""

    rows: StreamRows
    first: token_store.Corpus
    origin: dict[str, str]


def load_stream(
    recipe: Recipe, encoder: Encoder, make_rows: Callable[[token_store.TokenStream], Rows]
) -> splits.Splits[Rows]:
    """Load the streamed training rows and the validation rows. Raises DataError for unusable data.

    Documents are held out by their content. Those of the first block of each source are evaluated on; those of later
    blocks are neither trained nor evaluated on.
    """
    fraction = sources.validation_fraction(recipe)
    opened = partial(_open_stream, recipe, encoder, make_rows)
    streams = splits.call_all(partial(opened, *source) for source in enumerate(recipe.data.sources()))
    train: StreamRows | MixedStreams = streams[0].rows
    if recipe.data.mixture is not None:
        train = MixedStreams([stream.rows for stream in streams], [source.weight for source in recipe.data.mixture])
        splits.check_distinct(recipe, train)
    validation = None
    if recipe.evaluation is not None:
        data, path = recipe.evaluation, splits.path_of(recipe.evaluation)
        cache = cache_folder(data.cache_dir)
        if address(path) is None:
            evaluated = token_store.load_corpus(splits.find_text(recipe, data), encoder, 0.0, cache)
        else:
            # Of a data set of the hub only the split's files are read, instead of downloading all of it first.
            files = stream_pieces.find_stream_files(path, data.pattern, data.text_column, Selection.of(recipe, data))
            pieces = tuple(stream_pieces.cut_into_chunks(files, data.shuffle_buffer_mib * 2**20))
            source = stream_pieces.ChunkSource(path, (), data.text_column, pieces)
            key = digest("evaluated", data.text_column, encoder.identity, *map(astuple, pieces))
            evaluated = token_store.load_corpus_into(cache / "tokens" / key, key, source, encoder, 0.0)
        validation = make_rows(evaluated.train)
    elif fraction > 0:
        held_out = [make_rows(stream.first.held_out) for stream in streams]
        validation = held_out[0] if len(held_out) == 1 else JoinedRows(held_out)
    origins = "; ".join(stream.origin[splits.ORIGIN] for stream in streams if stream.origin)
    num_empty = sum(stream.first.empty_documents for stream in streams)
    loaded = splits.Splits(train, validation, num_empty, {splits.ORIGIN: origins} if origins else {})
    if recipe.evaluation is not None:
        splits.check_validation(loaded, recipe)
    elif validation is not None and not len(validation):  # check_validation counts all documents of the data
        num_documents = sum(len(stream.first.train.offsets) - 1 for stream in streams)
        raise DataError(
            f"{recipe.data.name}: no document is held out (data.validation_fraction={fraction:g} of the "
            f"{num_documents} documents of the first block); raise it, or data.shuffle_buffer_mib, or set evaluate.path"
        )
    return loaded


def _open_stream(
    recipe: Recipe,
    encoder: Encoder,
    make_rows: Callable[[token_store.TokenStream], Rows],
    source: int,
    data: Data,
) -> _Stream:
    fraction, path, selection = sources.validation_fraction(recipe), splits.path_of(data), Selection.of(recipe, data)
    files = stream_pieces.find_stream_files(path, data.pattern, data.text_column, selection)
    buffer_bytes = data.shuffle_buffer_mib * 2**20
    pieces = stream_pieces.cut_into_chunks(files, buffer_bytes)
    if not pieces:
        raise DataError(f"{path}: the files are empty; correct data.path or data.pattern")
    blocks = stream_pieces.ShuffleBlocks(pieces, buffer_bytes, recipe.seed + source)
    folder = _Folder(recipe, source)

    def read(block: int) -> token_store.Corpus:
        chunks = stream_pieces.ChunkSource(path, (), data.text_column, blocks[block])
        # the pieces contain their files' versions, so that a changed file is tokenised again
        key = digest(data.text_column, fraction, encoder.identity, *map(astuple, chunks.pieces))
        return token_store.load_corpus_into(folder.of(block, key), key, chunks, encoder, fraction)

    first = read(0)  # now, so that most mistakes in the data are reported before a model is loaded
    read_as = (data.text_column, data.shuffle_buffer_mib, fraction, encoder.identity)
    facts = {
        "files": len(files),
        "megabytes": round(sum(file.size for file in files) / 1e6, 1),
        "blocks_per_epoch": blocks.per_epoch,
        "first_block_documents": len(first.train.offsets) - 1,
        "first_block_tokens": len(first.train.tokens),
    }
    fingerprint = digest(stream_pieces.fingerprint(files), *read_as)
    rows = StreamRows(lambda block: make_rows(read(block).train), folder.drop, blocks.per_epoch, fingerprint, facts)
    origin = {}
    # `relative` begins with OWNER/NAME@COMMIT if the files are those of a split of the hub (stream_pieces.py)
    if files[0].name.startswith("hf://") and "@" in files[0].relative:
        name, commit = "/".join(files[0].relative.split("/")[:2]).split("@")
        text = f"{name}, config {data.config or 'default'}, split {data.split}, commit {commit}"
        origin = {splits.ORIGIN: text}
    return _Stream(rows, first, origin)


class _Folder:
    """Folder of a source's tokenised blocks: the first one, for the validation rows, and those near the position.

    Each run has its own folder, because it deletes blocks that it no longer needs. The first process of each machine
    deletes them.
    """

    def __init__(self, recipe: Recipe, source: int):
        name = digest(str(Path(recipe.output_dir).absolute())) + (f"_source{source}" if source else "")
        self._path = cache_folder(recipe.data.cache_dir) / "streams" / name
        self._clears = os.environ.get("LOCAL_RANK", "0") == "0"

    def of(self, block: int, key: str) -> Path:
        return self._path / f"{block:08d}_{key}"

    def drop(self, before: int) -> None:
        for folder in self._path.glob("[0-9]*_*") if self._clears else ():
            if 0 < int(folder.name.split("_")[0]) < before:
                shutil.rmtree(folder, ignore_errors=True)
