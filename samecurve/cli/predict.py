"""Ask a trained model that does not write: the class of a text, the score of an answer, a vector, or a hidden word.

    classify  a label and its probability
    reward    the score of each TEXT as an answer to --prompt
    embed     how similar the texts are to one another; their vectors with --json
    mlm       what is likeliest to stand in each [MASK]

Texts are read as in training: cut where the run's rows were cut. One line per text; JSON lines with --json, and where
the output is no terminal. An adapter is put beside its base model on the fly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.data.formats import read_rows, read_text
from samecurve.errors import ConfigurationError, DataError
from samecurve.specs.file_kinds import table_kind

if TYPE_CHECKING:
    from samecurve.inference.predictor import Predictor

TOP, BATCH = 5, 32
SHOWN = 60  # characters of a text
TABLE = 10  # texts whose similarities to each other are shown; of more texts each one's nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="without: the lines of the standard input")
    parser.add_argument(
        "--file",
        type=Path,
        help="instead of TEXT: a text per line, or a table (jsonl, json, csv, parquet) with the columns of the run's "
        "data; for a reward model messages, or prompt and completion",
    )
    parser.add_argument("--prompt", help="what each TEXT answers (reward models)")
    parser.add_argument("--top", type=int, metavar="N", help=f"fillers of each mask (mlm); default: {TOP}")
    parser.add_argument("--batch_size", type=int, default=BATCH, metavar="N", help=f"default: {BATCH}")
    parser.add_argument("--json", action="store_true", help="a JSON object per text, with every number")


def run(arguments: argparse.Namespace) -> int:
    for option in ("top", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option}: found {value}, a number of at least 1 is needed")
    asked = _asked(arguments)
    first = next(asked, None)
    if first is None:
        raise DataError(f"{arguments.file or 'the input'}: holds no text")
    from samecurve.inference.predictor import load

    predictor = load(arguments.run, arguments.prompt, arguments.top)
    answers = _answers(predictor, chain([first], asked), arguments.batch_size)
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


def _asked(arguments: argparse.Namespace) -> Iterator[tuple[str, str | dict]]:
    """(place, text or a table's row). ConfigurationError where nothing is given, or two things."""
    if arguments.texts and arguments.file:
        raise ConfigurationError("--file: given together with TEXT; keep one of them")
    if arguments.texts:
        return ((f"TEXT {number}", text) for number, text in enumerate(arguments.texts, start=1))
    if arguments.file is None:
        if sys.stdin.isatty():
            raise ConfigurationError("no text is given: predict RUN TEXT ..., or --file FILE, or lines on its input")
        return _text_lines("line", sys.stdin)
    if not arguments.file.is_file():
        raise ConfigurationError(f"--file: no such file: {arguments.file.absolute()}")
    if table_kind(arguments.file):
        return read_rows(arguments.file)
    return _text_lines(f"{arguments.file}", read_text(arguments.file).splitlines())


def _text_lines(name: str, lines) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{name}:{number}", line.rstrip("\r\n")


def _answers(predictor: Predictor, asked: Iterator[tuple[str, str | dict]], batch_size: int) -> Iterator[dict]:
    while batch := list(islice(asked, batch_size)):
        yield from predictor.answers(batch)


def _lines(answers: Iterator[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """(what a terminal shows, whether the text was cut)."""
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
    """A filler may be a line break."""
    return ", ".join(f"{name if name.strip() else repr(name)} {probability:.3f}" for name, probability in found)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _similarities(vectors: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Cosines, as the vectors have length 1."""
    import numpy as np

    found = np.array([answer["embedding"] for answer in vectors])
    return (found @ found.T).tolist()


def _table(vectors: Sequence[dict[str, Any]], similar: list[list[float]]) -> Iterator[str]:
    for number, (answer, row) in enumerate(zip(vectors, similar, strict=True), start=1):
        yield f"{number:>3}  {' '.join(f'{value:6.3f}' for value in row)}  {_short(answer['text'])}"


def _nearest(vectors: Sequence[dict[str, Any]], similar: list[list[float]]) -> Iterator[str]:
    for index, (answer, row) in enumerate(zip(vectors, similar, strict=True)):
        other = max((each for each in range(len(row)) if each != index), key=row.__getitem__)
        yield f"{row[other]:6.3f}  {_short(answer['text'])}  is nearest to  {_short(vectors[other]['text'])}"
