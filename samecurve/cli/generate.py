"""Generate text with an exported model, loaded in this process independently of training.

A chat model answers the prompt as a user's turn (with --raw it continues the prompt as text); other models continue it.
An adapter is loaded on top of its base model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Work
from samecurve.errors import ConfigurationError
from samecurve.inference import writing

LONGEST, LONGEST_FUNCTION, TEMPERATURE = 120, 256, 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("--prompt", help="default: one that fits the run's training data")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt, for a chat model")
    parser.add_argument("--raw", action="store_true", help="use no chat template: continue the prompt as plain text")
    longest = f"default: {LONGEST}; {LONGEST_FUNCTION} with --parse_rate"
    parser.add_argument("--max_new_tokens", type=int, help=longest)
    parser.add_argument(
        "--temperature", type=float, help=f"sampling temperature; 0: always the likeliest token; default: {TEMPERATURE}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parse_rate",
        metavar="N",
        type=int,
        help="instead of one sample: write the bodies of N functions of the Python library that were held out of "
        "builtin:python-functions, and print how many of them Python can parse",
    )


def run(arguments: argparse.Namespace) -> Work:
    counts_functions = arguments.parse_rate is not None
    if counts_functions and (arguments.prompt is not None or arguments.system is not None):
        raise ConfigurationError("--parse_rate: has prompts of its own; leave --prompt and --system out")
    longest, temperature = arguments.max_new_tokens, arguments.temperature
    if longest is None:
        longest = LONGEST_FUNCTION if counts_functions else LONGEST
    how = writing.Writing(longest, TEMPERATURE if temperature is None else temperature)
    writing.find_model(arguments.run)
    if counts_functions:
        return Work("samecurve.bench.parse_rate", (arguments, how))
    return Work("samecurve.inference.sample", (arguments, how))
