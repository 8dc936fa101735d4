"""Run a model that does not generate text. The output depends on the task that trained it:

    classify  a label and its probability; several labels, or a score, by classify.problem_type
    token_classify  the class of each word
    process_reward  whether each step is right
    reward    the score of each TEXT as an answer to --prompt
    embed     the similarities of the texts; their vectors with --json
    mlm       the most likely words for each [MASK]

Texts are processed as in training, with the same truncation. The output has one line per text. If it is not a
terminal, the lines are JSON. An adapter is loaded on top of its base model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from samecurve.cli.commands import Subcommand, add_precision_argument, add_trust_argument, require_positive
from samecurve.data.formats import read_rows, read_text
from samecurve.errors import ConfigurationError, DataError
from samecurve.specs.data_names import table_kind

TOP, BATCH = 5, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", default=[], help="the texts (default: the lines of standard input)"
    )
    parser.add_argument(
        "--file",
        type=Path,
        help="instead of TEXT: a file with one text per line, or a table (jsonl, json, csv, parquet) with the columns "
        "of the run's data; for a reward model the column messages, or prompt and completion",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="reward: the prompt that each TEXT answers")
    parser.add_argument("--top_k", type=int, metavar="N", help=f"mlm: number of candidates per mask (default: {TOP})")
    parser.add_argument(
        "--batch_size", type=int, default=BATCH, metavar="N", help="texts per batch (default: %(default)s)"
    )
    text = "write one JSON object per text, with all numbers, to this file; - for standard output"
    parser.add_argument("--json", metavar="FILE", help=text)
    add_precision_argument(parser)
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "top_k", "batch_size")
    if arguments.texts and arguments.file:
        raise ConfigurationError("--file: cannot be combined with TEXT; leave one of them out")
    # pairs of a place and a text or a table's row
    sources: Iterator[tuple[str, str | dict]]
    if arguments.texts:
        sources = ((f"TEXT {number}", text) for number, text in enumerate(arguments.texts, start=1))
    elif arguments.file is None:
        if sys.stdin.isatty():
            raise ConfigurationError("TEXT: no text given; add TEXT or --file FILE, or pipe lines into the command")
        sources = _text_lines("line", sys.stdin)
    elif not arguments.file.is_file():
        raise ConfigurationError(f"--file: no such file: {arguments.file.absolute()}")
    elif table_kind(arguments.file):
        sources = read_rows(arguments.file)
    else:
        sources = _text_lines(f"{arguments.file}", read_text(arguments.file).splitlines())
    first = next(sources, None)  # read here, so that its errors come before torch is loaded
    if first is None:
        raise DataError(f"{arguments.file or 'standard input'}: no text found")
    return Subcommand("samecurve.inference.predictions", (arguments, chain([first], sources)))


def _text_lines(name: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{name}:{number}", line.rstrip("\r\n")
