"""`predict`: prints the predictions of non-generative models as lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from samecurve.inference.predictor import Asked, Predictor, load

SHOWN = 60  # characters of a text that are shown
TABLE = 10  # up to so many texts all similarities are shown, for more texts only each one's nearest


def run(arguments: argparse.Namespace, texts: Iterator[Asked]) -> int:
    predictor = load(arguments.run, arguments.prompt, arguments.top)
    answers = _answers(predictor, texts, arguments.batch_size)
    if arguments.json or not sys.stdout.isatty():
        for answer in answers:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        return 0
    cut = 0
    for line, truncated in _lines(answers):
        print(line, flush=True)
        cut += truncated
    if cut:
        print(f"{cut} texts lost their end behind {predictor.length} tokens, as in training", file=sys.stderr)
    return 0


def _answers(predictor: Predictor, asked: Iterator[tuple[str, str | dict]], batch_size: int) -> Iterator[dict]:
    while batch := list(islice(asked, batch_size)):
        yield from predictor.answers(batch)


def _lines(answers: Iterator[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield (line for the terminal, whether the text was truncated)."""
    vectors = []
    for answer in answers:
        if "embedding" in answer:
            vectors.append(answer)
            continue
        yield _line(answer), answer["truncated"]
    if vectors:
        similar = _similarities(vectors)
        shown = _table if len(vectors) <= TABLE else _nearest
        yield from zip(shown(vectors, similar), [answer["truncated"] for answer in vectors], strict=True)


def _line(answer: dict[str, Any]) -> str:
    text = _short(answer["text"])
    if "label" in answer:
        likely = sorted(answer["probabilities"].items(), key=lambda each: -each[1])
        return f"{_likely(likely[:3]):<40}  {text}"
    if "score" in answer:
        return f"{answer['score']:9.4f}  {text}"
    masks = [_likely([(each["token"], each["probability"]) for each in mask]) for mask in answer["masks"]]
    return f"{text}  {' | '.join(masks)}"


def _likely(found: Sequence[tuple[str, float]]) -> str:
    # A filler may be a line break, which is shown as repr.
    return ", ".join(f"{name if name.strip() else repr(name)} {probability:.3f}" for name, probability in found)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _similarities(vectors: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return cosine similarities; the vectors have length 1."""
    found = np.array([answer["embedding"] for answer in vectors])
    return (found @ found.T).tolist()


def _table(vectors: Sequence[dict[str, Any]], similar: list[list[float]]) -> Iterator[str]:
    for number, (answer, row) in enumerate(zip(vectors, similar, strict=True), start=1):
        yield f"{number:>3}  {' '.join(f'{value:6.3f}' for value in row)}  {_short(answer['text'])}"


def _nearest(vectors: Sequence[dict[str, Any]], similar: list[list[float]]) -> Iterator[str]:
    for index, (answer, row) in enumerate(zip(vectors, similar, strict=True)):
        other = max((each for each in range(len(row)) if each != index), key=row.__getitem__)
        yield f"{row[other]:6.3f}  {_short(answer['text'])}  is nearest to  {_short(vectors[other]['text'])}"
