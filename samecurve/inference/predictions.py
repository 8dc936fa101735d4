"""`predict`: prints the predictions of non-generative models as lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.inference.predictor import Predictor, Source, load_predictor
from samecurve.storage.atomic import storage_errors
from samecurve.storage.terminal import json_line, printable

MOST_CHARACTERS = 60  # of a text in the output
MOST_TABLE_ROWS = 10  # for more texts, only the nearest one of each is printed


def run(arguments: argparse.Namespace, sources: Iterator[Source]) -> int:
    predictor = load_predictor(arguments.run, arguments.prompt, arguments.top_k, arguments.trust_remote_code)
    predictions = _predict_in_batches(predictor, sources, arguments.batch_size)
    if arguments.json and arguments.json != "-":
        predictions = _written(predictions, Path(arguments.json))
    if arguments.json == "-" or not sys.stdout.isatty():
        for prediction in predictions:
            print(json_line(prediction), flush=True)
            if getattr(sys.stdout, "is_gone", False) and arguments.json in (None, "-"):
                break  # as after `| head`
        return 0
    num_truncated = 0
    for line, truncated in _lines(predictions):
        print(printable(line), flush=True)
        num_truncated += truncated
    if num_truncated:
        texts = "1 text was" if num_truncated == 1 else f"{num_truncated} texts were"
        print(f"{texts} truncated to {predictor.length} tokens, as in training", file=sys.stderr)
    return 0


def _written(predictions: Iterator[dict], path: Path) -> Iterator[dict]:
    """Write each prediction as a line of JSON, and pass it on. Raises StorageError."""
    with storage_errors(path), open(path, "w", encoding="utf-8") as stream:
        for prediction in predictions:
            print(json.dumps(prediction, ensure_ascii=False), file=stream)
            yield prediction


def _predict_in_batches(predictor: Predictor, sources: Iterator[Source], batch_size: int) -> Iterator[dict]:
    while batch := list(islice(sources, batch_size)):
        yield from predictor.predict(batch)


def _lines(predictions: Iterator[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield (line for the terminal, whether the text was truncated)."""
    embedded = []
    for prediction in predictions:
        if "embedding" in prediction:
            embedded.append(prediction)
            continue
        yield _line(prediction), prediction["truncated"]
    if embedded:
        vectors = np.array([prediction["embedding"] for prediction in embedded])
        similarities = (vectors @ vectors.T).tolist()  # cosines, because the vectors have length 1
        lines = _table if len(embedded) <= MOST_TABLE_ROWS else _nearest
        truncated = [prediction["truncated"] for prediction in embedded]
        yield from zip(lines(embedded, similarities), truncated, strict=True)


def _line(prediction: dict[str, Any]) -> str:
    text = _shortened(prediction["text"])
    if "label" in prediction:
        likeliest = sorted(prediction["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        return f"{_with_probabilities(likeliest):<40}  {text}"
    if "score" in prediction:
        return f"{prediction['score']:9.4f}  {text}"
    masks = [[(token["token"], token["probability"]) for token in mask] for mask in prediction["masks"]]
    return f"{text}  {' | '.join(map(_with_probabilities, masks))}"


def _with_probabilities(pairs: Sequence[tuple[str, float]]) -> str:
    # repr shows a token that is only white space, such as a line break.
    return ", ".join(f"{name if name.strip() else repr(name)} {probability:.3f}" for name, probability in pairs)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..."


def _table(embedded: Sequence[dict[str, Any]], similarities: list[list[float]]) -> Iterator[str]:
    for number, (prediction, row) in enumerate(zip(embedded, similarities, strict=True), start=1):
        yield f"{number:>3}  {' '.join(f'{value:6.3f}' for value in row)}  {_shortened(prediction['text'])}"


def _nearest(embedded: Sequence[dict[str, Any]], similarities: list[list[float]]) -> Iterator[str]:
    for index, (prediction, row) in enumerate(zip(embedded, similarities, strict=True)):
        other = max((row_index for row_index in range(len(row)) if row_index != index), key=row.__getitem__)
        nearest = _shortened(embedded[other]["text"])
        yield f"{row[other]:6.3f}  {_shortened(prediction['text'])}  is nearest to  {nearest}"
