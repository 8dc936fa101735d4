"""Dispatch of `python -m samecurve COMMAND`. Each command is a module of this package.

A command's module has `add_arguments(parser)` and `run(arguments)`. The module does not import torch, so that help and
argument errors appear at once. Work that needs torch is in a module of a lower layer; `run` returns a `Subcommand` that
names it. The commands of `bench` are modules of the package cli/bench.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from samecurve.config import own_code
from samecurve.config.documents import describe
from samecurve.config.key_hints import near_option
from samecurve.errors import ConfigurationError, SamecurveError, without_credentials
from samecurve.specs.data_names import is_import_path
from samecurve.specs.environment import train_script
from samecurve.specs.precision import DTYPES
from samecurve.storage import terminal, trusted_code
from samecurve.storage.atomic import known_cause
from samecurve.storage.filesystem import name_problem
from samecurve.strategy import preflight

INTERRUPTED = 130  # the shell's exit code for SIGINT
COMMANDS = {
    "inspect": "show the training data of a recipe, token by token, without a model",
    "compare": "run the same short job under each strategy and compare the curves",
    "prove": "show that a training script trains the same under each strategy, or where it does not",
    "bisect": "find the step, module, rank and line where a training under a strategy, or a changed one, parts",
    "doctor": "look for what would stop a run on this machine or cluster",
    "rehearse": "try the longest batch, an evaluation, a checkpoint and an export of a run",
    "plan": "predict memory and step time of a job under each strategy, without a GPU",
    "launch": "print the command or file that starts a run on several machines, or start it",
    "summary": "summarize a run and print the commands to look at it or continue it",
    "sweep": "train a recipe with several values of some keys, and compare the runs",
    "report": "write an HTML page with the curves and settings of one run or several",
    "generate": "generate text with a trained model",
    "chat": "chat with a trained model",
    "predict": "run a classifier, reward model, embedding model or masked language model",
    "evaluate": "evaluate a trained model on held-out data",
    "lm_eval": "evaluate a trained model on public benchmarks",
    "adopt": "go on from a checkpoint of Trainer, Accelerate, DeepSpeed or torch",
    "export": "export a run or a checkpoint as a folder to share, with a model card",
    "bench": "measure matrix products, collectives, memory, data loading and a recipe's step",
    "merge": "merge an adapter into its base model, and check that the result is the same",
    "new": "write a recipe from the answers to five questions",
    "path": "print where a shipped recipe or strategy is",
}
BENCH_COMMANDS = {
    "matmul": "measure matrix multiplications and memory copies of this device",
    "collectives": "measure time and bandwidth of collectives by message size",
    "memory": "measure what a process holds beside its tensors",
    "dataloader": "measure rows per second by number of workers, and find how many are enough",
    "step": "measure a recipe's step with each performance option on and off",
}


class Subcommand(NamedTuple):
    """The work of a command after its arguments are checked: `run(*arguments)` of `module`.

    The module may import torch. It is given by name, so that only the commands that need torch wait for its import.

    Attributes:
        failure: what the command ends with, whatever the work finds.
    """

    module: str
    arguments: tuple
    failure: SamecurveError | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code (see errors.py). Only the module of that command is imported."""
    terminal.set_up()
    argv = sys.argv[1:] if argv is None else list(argv)
    program = "samecurve" if os.path.basename(sys.argv[0]) == "samecurve" else "python -m samecurve"
    try:
        return _dispatch(program, "samecurve.cli", COMMANDS, argv)
    except SamecurveError as error:
        if not error.is_printed:
            print(terminal.printable(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if (known := known_cause(error)) is None:
            raise
        print(terminal.printable(str(known)), file=sys.stderr)
        return known.exit_code


def _dispatch(program: str, package: str, commands: Mapping[str, str], argv: Sequence[str]) -> int:
    width = max(map(len, commands)) + 2
    listed = "\n".join(f"  {name:<{width}}{text}" for name, text in commands.items())
    parser = argparse.ArgumentParser(
        program,
        usage=f"{program} [-h] COMMAND ...",
        description=f"commands:\n{listed}",
        epilog=f"{program} COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    command = parser.parse_args(argv[:1]).command
    if command not in commands:
        near = difflib.get_close_matches(command, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
        hint = f"python {train_script()} RECIPE trains" if command == "train" else hint
        parser.error(f"no command {without_credentials(command)}; {hint}")
    program = f"{program} {command}"
    if command == "bench":
        return _dispatch(program, f"{package}.bench", BENCH_COMMANDS, argv[1:])
    module = importlib.import_module(f".{command}", package)
    for argument in argv[1:]:
        if re.match(r"[a-z0-9+.:-]+://", argument):  # Path would make "s3:/" of it; key=URL is for the recipe
            raise ConfigurationError(
                f"{argument}: commands read local run directories; give the run's, or copy the store's folder"
            )
    arguments = _Parser(program, description=module.__doc__, formatter_class=_ParagraphFormatter, allow_abbrev=False)
    module.add_arguments(arguments)
    given = arguments.parse_intermixed_args(argv[1:])
    for option, value in vars(given).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and (problem := name_problem(path)):
                raise ConfigurationError(f"{option}: found {describe(str(path))}, {problem}")
    result = module.run(given)
    if isinstance(result, Subcommand):
        preflight.quiet_libraries()  # nearly all of them import transformers
        return do(result)
    return result


def do(command: Subcommand) -> int:
    """Do the work of a command, then raise its failure, if it has one."""
    try:
        code = importlib.import_module(command.module).run(*command.arguments)
    except SamecurveError as error:
        if not command.failure:
            raise
        print(terminal.printable(str(error)), file=sys.stderr)
        code = error.exit_code
    if command.failure:
        raise command.failure
    return code


def whole_number(option: str) -> Callable[[str], int]:
    """Return the reader of an option's value, which raises ConfigurationError for what is no whole number."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ConfigurationError(f"{option}: found {text}, but it must be a whole number, such as {option} 8")
        return int(text)

    return read


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        trusted_code.OPTION,
        action="store_true",
        help="run the Python files that come with the model; they can do anything (default: only code that a training "
        "of yours ran by model.trust_remote_code)",
    )


def add_precision_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=tuple(DTYPES),
        help="of the weights and the computation (default: fp32 on a CPU; on a GPU the run's, bf16 if unknown)",
    )


def add_code_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that loads a run's task."""
    add_trust_argument(parser)
    parser.add_argument(
        own_code.OPTION,
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="import a class or function that the run's recipe names, from the working directory or an installed "
        "package; it can do anything (may be repeated)",
    )


def allow_own_code(arguments: argparse.Namespace) -> None:
    """Allow the import paths of --own_code. Raises ConfigurationError for what is none."""
    for path in arguments.own_code:
        if not is_import_path(path):
            raise ConfigurationError(f"{own_code.OPTION}: found {path}, expected MODULE:NAME as in the recipe")
    own_code.allow(arguments.own_code, ["."])


def require_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Raise ConfigurationError for a whole number below 1, or another number that is not above 0. None is not given."""
    for option in options:
        value = getattr(arguments, option)
        least = "at least 1" if isinstance(value, int) else "a number above 0"
        if value is not None and not (value >= 1 if isinstance(value, int) else 0 < value < math.inf):
            raise ConfigurationError(f"--{option}: found {value}, but it must be {least}")


class _ParagraphFormatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description on its own and leaves indented lines, such as lists, as they are."""

    # argparse joins all paragraphs into one. Its RawDescriptionHelpFormatter, which also overrides this method, would
    # keep the docstring's line breaks, which are too far right for a narrow terminal.
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        fill = super()._fill_text
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in paragraphs)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(without_credentials(message + near_option(message, self)))
