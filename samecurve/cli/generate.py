"""Generate text with an exported model, which is loaded in this process without a training strategy.

A chat model answers the prompt as a user's message; with --raw it continues the prompt as plain text. Other models
always continue the prompt. An adapter is loaded on top of its base model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Subcommand, add_precision_argument, add_trust_argument
from samecurve.inference import generation

MAX_NEW_TOKENS = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    text = "the prompt; default: one that suits the run's training data"
    parser.add_argument("prompt", metavar="TEXT", nargs="?", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--prompt", metavar="TEXT", help="the same, also before RUN")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, for a chat model")
    parser.add_argument("--raw", action="store_true", help="use no chat template: continue the prompt as plain text")
    text = "with the weights that a run from scratch began with, to compare"
    parser.add_argument("--untrained", action="store_true", help=text)
    most = "most tokens to generate (default: %(default)s)"
    parser.add_argument("--max_new_tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help=most)
    generation.add_sampling_arguments(parser, default_temperature=0.5)
    add_precision_argument(parser)
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    options = generation.GenerationOptions(arguments.max_new_tokens, arguments.temperature)
    generation.find_generative_model(arguments.run)  # raises where there is none, before torch is loaded
    return Subcommand("samecurve.inference.generator", (arguments, options))
