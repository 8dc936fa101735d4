"""Generate text with an exported model, which is loaded in this process without a training strategy.

A chat model answers the prompt as a user's message; with --raw it continues the prompt as plain text. Other models
always continue the prompt. An adapter is loaded on top of its base model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Work, add_trust_argument
from samecurve.errors import ConfigurationError
from samecurve.inference import generation

MAX_NEW_TOKENS, MAX_FUNCTION_TOKENS = 120, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("--prompt", metavar="TEXT", help="default: a prompt that suits the run's training data")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, for a chat model")
    parser.add_argument("--raw", action="store_true", help="use no chat template: continue the prompt as plain text")
    text = "with the weights that a run from scratch began with, to compare"
    parser.add_argument("--untrained", action="store_true", help=text)
    most = f"most tokens to generate (default: {MAX_NEW_TOKENS}; {MAX_FUNCTION_TOKENS} with --parse_rate)"
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help=most)
    generation.add_sampling_arguments(parser, default_temperature=0.5)
    parser.add_argument(
        "--parse_rate",
        metavar="N",
        type=int,
        help="instead of one sample: write the bodies of N held-out functions of builtin:python-functions (Python's "
        "standard library), and print how many of them Python can parse",
    )
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Work:
    counts_functions = arguments.parse_rate is not None
    if counts_functions and (arguments.prompt is not None or arguments.system is not None):
        raise ConfigurationError("--parse_rate: brings its own prompts; leave out --prompt and --system")
    max_new_tokens = arguments.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = MAX_FUNCTION_TOKENS if counts_functions else MAX_NEW_TOKENS
    options = generation.GenerationOptions(max_new_tokens, arguments.temperature)
    generation.find_generative_model(arguments.run)  # raises where there is none, before torch is loaded
    if counts_functions:
        return Work("samecurve.bench.parse_rate", (arguments, options))
    return Work("samecurve.inference.sample", (arguments, options))
