"""`predict`: prints the predictions of non-generative models as lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.inference.predictor import Source, load_predictor
from samecurve.storage.atomic import storage_errors
from samecurve.storage.terminal import json_line, printable

MOST_CHARACTERS = 60  # of a text in the output
MOST_TABLE_ROWS = 10  # for more texts, only the nearest one of each is printed


def run(arguments: argparse.Namespace, sources: Iterator[Source]) -> int:
    trusts = arguments.trust_remote_code
    predictor = load_predictor(arguments.run, arguments.prompt, arguments.top_k, trusts, arguments.precision)
    batches = iter(lambda: list(islice(sources, arguments.batch_size)), [])
    predictions = chain.from_iterable(map(predictor.predict, batches))
    if arguments.json and arguments.json != "-":
        predictions = _written(predictions, Path(arguments.json))
    if arguments.json == "-" or not sys.stdout.isatty():
        for prediction in predictions:
            print(json_line(prediction), flush=True)
            if getattr(sys.stdout, "is_gone", False) and arguments.json in (None, "-"):
                break  # as after `| head`
        return 0
    num_truncated = 0
    embedded: list[dict[str, Any]] = []
    for prediction in predictions:
        num_truncated += prediction["truncated"]
        if "embedding" in prediction:
            embedded.append(prediction)
        else:
            print(printable(_line(prediction)), flush=True)
    for line in _similarities(embedded) if embedded else ():
        print(printable(line), flush=True)
    if num_truncated:
        texts = "1 text was" if num_truncated == 1 else f"{num_truncated} texts were"
        print(f"{texts} truncated to {predictor.length} tokens, as in training", file=sys.stderr)
    return 0


def _written(predictions: Iterator[dict], path: Path) -> Iterator[dict]:
    """Write each prediction as a line of JSON, and pass it on. Raises StorageError."""
    with storage_errors(path), open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for prediction in predictions:
            print(json.dumps(prediction, ensure_ascii=False), file=stream)
            yield prediction


def _line(prediction: dict[str, Any]) -> str:
    text = _shortened(prediction["text"])
    if "probabilities" in prediction:
        likeliest = sorted(prediction["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        return f"{_with_probabilities(likeliest):<40}  {text}"
    if "words" in prediction:
        return "  ".join(f"{_shortened(word['word'])}/{word['label']}" for word in prediction["words"])
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


def _similarities(embedded: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each text: its similarities to all, or to the nearest of more than MOST_TABLE_ROWS."""
    vectors = np.array([prediction["embedding"] for prediction in embedded])
    cosines = vectors @ vectors.T  # because the vectors have length 1
    for index, (prediction, row) in enumerate(zip(embedded, cosines, strict=True)):
        text = _shortened(prediction["text"])
        if len(embedded) <= MOST_TABLE_ROWS:
            yield f"{index + 1:>3}  {' '.join(f'{value:6.3f}' for value in row)}  {text}"
            continue
        row[index] = -np.inf
        nearest = int(row.argmax())
        yield f"{row[nearest]:6.3f}  {text}  is nearest to  {_shortened(embedded[nearest]['text'])}"
