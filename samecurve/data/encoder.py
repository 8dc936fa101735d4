"""Base of the encoders, which turn documents into token ids, on every core and in order."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samecurve.data.row_checks import BadRow
from samecurve.distributed.affinity import init_worker, num_cores
from samecurve.errors import DataError
from samecurve.specs.data_names import Truncation
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Encoded(NamedTuple):
    """Token ids of one document ([] for an empty one) with its trained marks, segments and so on (see TokenStream).

    `more`: the other rows, if one document of the source becomes several documents of the token stream.
    """

    tokens: Sequence[int] | np.ndarray
    trained: Sequence[int] | np.ndarray | None = None
    segments: Sequence[int] | np.ndarray | None = None
    label: int | list[float] | None = None
    more: tuple[Encoded, ...] = ()
    weights: np.ndarray | None = None
    tags: np.ndarray | None = None


SPECIAL = "documents_with_special_tokens"


class Encoder(ABC):
    """Turns documents into token ids.

    Uses a copy of the tokenizer's Rust backend, which runs on every core. The copy neither truncates nor pads.

    Attributes:
        identity: changes when the ids for the same document do.
        masked: whether some tokens are not trained.
        segmented: whether documents have segments.
        weighted: whether the losses of tokens have weights.
        tagged: whether some tokens have a class.
        labelled: whether documents have a label.
        renders: whether much of the work is done in Python, outside of the Rust backend.
        ends_texts: whether texts end with an end-of-text token.
        counted: names of `counts`.
        rare: those that are left out of reports where nothing was counted.
        counts: what was counted in the documents so far, by name.
        facts: what the header and run.json say of the encoder, by name.
        dtype: smallest unsigned dtype that holds all ids, of uint16 and uint32.

    Raises:
        DataError: for a tokenizer without a Rust backend, or without an end-of-text token if `ends_texts`.
    """

    masked = segmented = weighted = tagged = labelled = renders = False
    ends_texts = True
    counted: tuple[str, ...] = (SPECIAL,)
    rare: tuple[str, ...] = (SPECIAL,)

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        from tokenizers import Tokenizer

        if not hasattr(tokenizer, "backend_tokenizer"):
            raise DataError(f"{tokenizer.name_or_path}: not a fast tokenizer; use one with a tokenizer.json")
        if self.ends_texts and tokenizer.eos_token_id is None:
            raise DataError(f"{tokenizer.name_or_path}: there is no eos_token; name one in tokenizer_config.json")
        self._begin, self._end = _known(tokenizer.bos_token_id), _known(tokenizer.eos_token_id)
        self._rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # Some published tokenizer.json files truncate or pad. With encode_special_tokens, special tokens that occur in
        # a document are encoded as text.
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = True
        self.identity = digest(self._rust.to_str(), self._begin, self._end)
        self.counts = dict.fromkeys(self.counted, 0)
        names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self.facts: dict[str, str] = {}
        self.dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32)

    @property
    def token_arrays(self) -> list[str]:
        """Names of the arrays of TokenStream that are stored per token in addition to the ids."""
        beside = {"trained": self.masked, "segments": self.segmented, "weights": self.weighted, "tags": self.tagged}
        return [name for name, wanted in beside.items() if wanted]

    def reads(self, key: str) -> bool:
        """Whether a key of messages, other than those that each row's schema reads, may change the tokens."""
        return False

    def _count_special(self, texts: Iterable[str]) -> None:
        """Count the texts with special tokens, which are encoded as text: another library may read them as tokens."""
        if self._special is not None:
            self.counts[SPECIAL] += sum(map(bool, map(self._special.search, texts)))

    @abstractmethod
    def encode(self, documents: list) -> list[Encoded]:
        """Encode the documents, in order, and update `counts`. Raises DataError for one that cannot be encoded."""


class TruncatingEncoder(Encoder):
    """Base of encoders that truncate each text to `sequence_length` tokens, special tokens included.

    Counts:
        too_long_documents: documents that are left out, because data.truncation is `drop`.
        the first of `counted`: what was truncated.
    """

    ends_texts = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sequence_length: int, truncation: Truncation = "right"):
        super().__init__(tokenizer)
        self._length, self._truncation = sequence_length, truncation
        self._rust.enable_truncation(sequence_length, direction="left" if truncation == "left" else "right")
        # the identity so far is that of the tokenizer without truncation
        self.identity = digest(self.identity, sequence_length, truncation)

    def _stays(self, place: str, are_longer: Iterable[object]) -> bool:
        """Whether a document is not left out. Raises DataError for a longer text where data.truncation is `error`.

        `are_longer` is true for each of its texts that was truncated.
        """
        num_longer = sum(map(bool, are_longer))
        if num_longer and self._truncation == "error":
            raise DataError(
                f"{place}: longer than the {self._length} tokens of batch.sequence_length; raise it, or set "
                "data.truncation to right, left or drop"
            )
        if num_longer and self._truncation == "drop":
            self.counts["too_long_documents"] += 1
            return False
        self.counts[self.counted[0]] += num_longer
        return True


def _known(token_id: Any) -> list[int]:
    """Return the id in a list, [] for None. transformers types no special token."""
    return [] if token_id is None else [token_id]


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest id plus one."""
    # A vocabulary may have gaps, so its length can be too small.
    return max(tokenizer.get_vocab().values()) + 1


# Processes start only for this many bytes, because each needs seconds to start: it has to import transformers.
_WORTH_BYTES = 8 << 20
_worker_encoder: Encoder | None = None  # a worker process has only one


def encoded(encoder: Encoder, batches: Iterable[list], num_bytes: int) -> Iterator[tuple[list, list[Encoded | BadRow]]]:
    """Yield each batch of documents with its encoded documents, and a BadRow for each that cannot be encoded.

    A tokenizer's Rust backend uses every core by itself. If much of the work is done in Python (Encoder.renders) and
    the documents are large enough, worker processes share the batches. The encoder's counts include each batch that was
    yielded.

    Args:
        batches: lists of documents. A BadRow in the place of a document is passed on.
    """
    num_workers = num_cores()
    if not encoder.renders or num_workers < 2 or num_bytes < _WORTH_BYTES:
        yield from ((documents, _encode_with(encoder, documents)) for documents in batches)
        return
    # Spawned, because a forked process would inherit the locks of this process's threads without the threads.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (encoder,))
    waiting: deque[tuple[list, Future]] = deque()

    def first() -> tuple[list, list[Encoded | BadRow]]:
        documents, future = waiting.popleft()
        results, counts = future.result()
        # the worker has counted in its own copy of the encoder
        for name, count in counts.items():
            encoder.counts[name] += count
        return documents, results

    try:
        for documents in batches:
            waiting.append((documents, pool.submit(_encode, documents)))
            # enough to keep every worker busy, without all documents in memory
            if len(waiting) > 2 * num_workers:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(encoder: Encoder) -> None:
    global _worker_encoder
    init_worker()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has its worker
    _worker_encoder = encoder


def _encode(documents: list) -> tuple[list[Encoded | BadRow], dict[str, int]]:
    """Encode documents in a worker. Returns them with the counts of these documents."""
    encoder = _worker_encoder
    assert encoder is not None  # _begin ran when this process started
    before = dict(encoder.counts)
    results = _encode_with(encoder, documents)
    return results, {name: count - before[name] for name, count in encoder.counts.items()}


def _encode_with(encoder: Encoder, entries: list) -> list[Encoded | BadRow]:
    before, documents = dict(encoder.counts), [entry for entry in entries if not isinstance(entry, BadRow)]
    try:
        results: list[Encoded | BadRow] = [*encoder.encode(documents)] if documents else []
    except DataError:  # of one of them: which ones?
        encoder.counts.update(before)
        results = []
        for document in documents:
            before = dict(encoder.counts)
            try:
                results += encoder.encode([document])
            except DataError as error:
                encoder.counts.update(before)
                results.append(BadRow.of(document.place, error))
    following = iter(results)
    return [entry if isinstance(entry, BadRow) else next(following) for entry in entries]
