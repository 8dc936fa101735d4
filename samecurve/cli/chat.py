"""Talk with a trained chat model: interactively in a terminal, or one answer to a prompt from a pipe.

/system TEXT sets the system prompt, /reset begins a new conversation, /quit or Ctrl-D exits. Ctrl-C stops the current
answer and keeps the part already written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from samecurve.cli.commands import Work
from samecurve.errors import ConfigurationError
from samecurve.inference import writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a folder with a model or an adapter")
    parser.add_argument("--system", metavar="TEXT", default="", help="system message before the conversation")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="longest answer, in tokens")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="sampling temperature; 0: always the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> Work:
    how = writing.Writing(arguments.max_new_tokens, arguments.temperature)
    piped = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if piped == "":
        raise ConfigurationError(
            f"nothing came to answer; echo 'a question' | python -m samecurve chat {arguments.run}"
        )
    writing.find_model(arguments.run)
    return Work("samecurve.inference.chat", (arguments, how, piped))
