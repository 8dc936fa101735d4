"""Documents to tokens on every core, in the order of the documents."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from samecurve.distributed.cpu_workers import init_worker, num_cores

if TYPE_CHECKING:
    from samecurve.data.encoder import Encoded, Encoder

# a process needs seconds to start: it has to import transformers
_WORTH_BYTES = 8 << 20
_worker_encoder: Encoder | None = None  # of a worker's process, which has only one


def encoded(encoder: Encoder, batches: Iterable[list], num_bytes: int) -> Iterator[tuple[list, list[Encoded]]]:
    """Each batch of documents with what the encoder makes of it; the encoder's counts include it then.

    A tokenizer's Rust part uses every core by itself. Where much of the work is Python's (Encoder.renders), and there
    are enough bytes for it, processes share the batches. Raises what `encoder.encode` does.
    """
    num_workers = num_cores()
    if not encoder.renders or num_workers < 2 or num_bytes < _WORTH_BYTES:
        yield from ((documents, encoder.encode(documents)) for documents in batches)
        return
    # spawned: a fork would have the locks of the threads that this process runs, without the threads
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _begin, (encoder,))
    waiting: deque[tuple[list, Future]] = deque()

    def first() -> tuple[list, list[Encoded]]:
        documents, future = waiting.popleft()
        found, counts = future.result()
        for name, count in counts.items():
            encoder.counts[name] += count
        return documents, found

    try:
        for documents in batches:
            waiting.append((documents, pool.submit(_encode, documents)))
            if len(waiting) > 2 * num_workers:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(encoder: Encoder) -> None:
    global _worker_encoder
    init_worker()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared out already
    _worker_encoder = encoder


def _encode(documents: list) -> tuple[list[Encoded], dict[str, int]]:
    """With what was counted in these documents."""
    before = dict(_worker_encoder.counts)
    found = _worker_encoder.encode(documents)
    return found, {name: count - before[name] for name, count in _worker_encoder.counts.items()}
