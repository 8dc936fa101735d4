"""Measure a trained model on public benchmarks with EleutherAI's lm-evaluation-harness, which is installed separately.

The harness runs as a separate program on the exported model (an adapter together with its base model). It uses the chat
template if the run trained on chats. The tasks come from the Hugging Face hub, so their first use needs the network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Subcommand, add_trust_argument, require_positive
from samecurve.config.adapter_folder import base_path
from samecurve.inference import folders
from samecurve.specs.precision import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument(
        "tasks", metavar="TASKS", help="task names, as `lm-eval ls tasks` lists them, for example arc_easy"
    )
    parser.add_argument(
        "--precision", choices=DTYPES, help="compute precision (default: the recipe's; fp32 without a run)"
    )
    parser.add_argument("--raw", action="store_true", help="use no chat template, even for a chat model")
    parser.add_argument("--limit", metavar="N", help="use only the first N examples of each task")
    parser.add_argument(
        "--batch_size", default="8", metavar="N", help="examples per batch, or auto on a GPU (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for the results (default: RUN/lm_eval)")
    parser.add_argument(
        "--harness_options",
        default="",
        metavar="TEXT",
        help="further options of lm-eval, as one argument: '--num_fewshot 5'",
    )
    parser.add_argument(
        "--timeout_minutes",
        type=float,
        default=1440.0,
        metavar="N",
        help="end lm-eval after this time: a chat template of a stranger may have no end (default: %(default)g)",
    )
    parser.add_argument("--show", action="store_true", help="print the lm-eval command and do not run it")
    add_trust_argument(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "timeout_minutes")
    folder, recipe = folders.model_folder(arguments.run), folders.known_recipe(arguments.run)
    return Subcommand("samecurve.inference.lm_eval", (arguments, folder, base_path(folder), recipe))
