"""Chat with a trained model in a terminal. A prompt from a pipe gets a single answer.

Commands of a conversation:

    /system TEXT  set the system prompt and begin a new conversation
    /reset        begin a new conversation
    /quit         exit, as Ctrl-D does
    Ctrl-C        stop the current answer and keep its beginning
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from samecurve.cli.commands import Subcommand, add_precision_argument, add_trust_argument
from samecurve.errors import ConfigurationError
from samecurve.inference import generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt of the conversation")
    parser.add_argument(
        "--max_new_tokens", type=int, default=512, metavar="N", help="most tokens of an answer (default: %(default)s)"
    )
    generation.add_sampling_arguments(parser, default_temperature=0.7)
    add_precision_argument(parser)
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    options = generation.GenerationOptions(arguments.max_new_tokens, arguments.temperature)
    piped = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if piped == "":
        raise ConfigurationError(
            f"standard input: found no prompt; try echo 'a question' | python -m samecurve chat {arguments.run}"
        )
    generation.find_generative_model(arguments.run)  # raises where there is none, before torch is loaded
    return Subcommand("samecurve.inference.chat", (arguments, options, piped))
