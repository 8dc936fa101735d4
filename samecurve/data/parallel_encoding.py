"""Tokenises documents on every core and keeps their order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from samecurve.data.row_checks import BadRow
from samecurve.distributed.cpu_workers import init_worker, num_cores
from samecurve.errors import DataError

if TYPE_CHECKING:
    from samecurve.data.encoder import Encoded, Encoder

# Processes start only for this many bytes, because each needs seconds to start: it has to import transformers.
_WORTH_BYTES = 8 << 20
_worker_encoder: Encoder | None = None  # a worker process has only one


def encoded(encoder: Encoder, batches: Iterable[list], num_bytes: int) -> Iterator[tuple[list, list[Encoded | BadRow]]]:
    """Yield each batch of documents with its encoded documents, and a BadRow for each that cannot be encoded.

    A tokenizer's Rust backend uses every core by itself. If much of the work is done in Python (Encoder.renders) and
    the documents are large enough, worker processes share the batches. The encoder's counts include each batch that was
    yielded.

    Args:
        encoder: turns documents into token ids.
        batches: lists of documents. A BadRow in the place of a document is passed on.
        num_bytes: size of all documents.
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
            try:
                results += encoder.encode([document])
            except DataError as error:
                results.append(BadRow.of(document.place, error))
    following = iter(results)
    return [entry if isinstance(entry, BadRow) else next(following) for entry in entries]
